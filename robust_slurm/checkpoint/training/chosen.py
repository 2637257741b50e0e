"""Choose the steps that go to the durable tier: all ranks must write the same ones."""

from __future__ import annotations

from .client import Client

WRITER_WAIT = 60.0  # s; a commit waits no longer for the parts of ranks that are late


class Chosen:
    """Decides which steps go to the durable tier.

    Under robust-srun (``asked``) only the first is decided here; robust-srun orders the others,
    each when the one before is over. Without it a rank waits for its writer, because no process
    tells the ranks which steps the slowest of them leaves out.
    """

    def __init__(self, client: Client, every: int, *, asked: bool) -> None:
        self._client, self._every, self._asked = client, every, asked
        self.at_once = False
        """True: write the next step, as only memory has the step that was resumed."""
        self.began = False
        """Under robust-srun: the first step is chosen."""
        self._lags = False

    def takes(self, step: int) -> bool:
        """True if this step is to be written. Call this once for each step."""
        due = self.at_once or (self._every > 0 and step % self._every == 0)
        self.at_once = False
        if self._asked:
            due, self.began = due and not self.began, self.began or due
        elif due:
            self._lags = not self._client.wait_free(1, 0.0 if self._lags else WRITER_WAIT)
        return due or self._client.wants(step)
