"""Choose the steps that go to the durable tier: all ranks must write the same ones."""

from __future__ import annotations

from collections.abc import Callable

from .by_time import ByTime
from .client import Client

WRITER_WAIT = 60.0  # s; a commit waits no longer for the parts of ranks that are late


class Chosen:
    """Decides which steps go to the durable tier.

    Under robust-srun (``asked``) only the first is decided here; robust-srun orders the others,
    each when the one before is over. Without it a rank waits for its writer, because no process
    tells the ranks which steps the slowest of them leaves out.
    """

    def __init__(
        self,
        client: Client,
        every: int,
        *,
        asked: bool,
        say: Callable[[str], None],
        by_time: ByTime | None = None,
    ) -> None:
        """``by_time``: chooses others than each ``every``-th; None: no step is chosen by time."""
        self._client, self._every, self._asked = client, every, asked
        self._by_time, self._say = by_time, say
        self._due = (-1, False)
        self.at_once = False
        """True: write the next step, as only memory has the step that was resumed."""
        self.began = False
        """Under robust-srun: the first step is chosen."""
        self._lags = False

    def follow(self, before: Chosen) -> None:
        """Go on from what another one has chosen."""
        self.began, self._due = before.began, before._due

    def due(self, step: int) -> bool:
        """True if the settings ask for this step."""
        if self._due[0] != step:
            by_step = self._every > 0 and step % self._every == 0
            self._due = step, self._is_time(step) or by_step
        return self._due[1]

    def _is_time(self, step: int) -> bool:
        if self._by_time is None:
            return False
        try:
            return self._by_time.takes(step)
        except Exception as error:  # noqa: BLE001 - whatever torch's stores raise
            self._by_time = None
            self._say(
                f"no step is written by time any more, as the ranks cannot agree on one "
                f"({type(error).__name__}: {error}). Pass every= to Checkpointer"
            )
            return False

    def takes(self, step: int) -> bool:
        """True if this step is to be written. Call this once for each step."""
        due = self.at_once or self.due(step)
        self.at_once = False
        if self._asked:
            due, self.began = due and not self.began, self.began or due
        elif due:
            self._lags = not self._client.wait_free(1, 0.0 if self._lags else WRITER_WAIT)
        return due or self._client.wants(step)
