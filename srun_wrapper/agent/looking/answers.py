"""The slots' samples of their ranks, joined to the node's one answer to an inspection."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from srun_wrapper.protocol.looking_messages import Machine
from srun_wrapper.protocol.messages import Inspected


class Answers:
    """Holds answers back until ``release``: the file systems must have been asked before."""

    def __init__(self, send: Callable[[Inspected], None]) -> None:
        self._send = send
        self._samples: dict[int, dict[int, Inspected]] = {}
        self._held: list[Inspected] = []

    def begin(self) -> None:
        """Forget an inspection that a slot has not answered."""
        self._samples.clear()

    def add(self, local: int, message: Inspected, slots: int) -> bool:
        """Add one slot's sample. True if it was the last of ``slots``: an answer is complete."""
        got = self._samples.setdefault(message.token, {})
        got[local] = message
        if len(got) < slots:
            return False
        samples = tuple(each.samples[0] for _, each in sorted(got.items()))
        del self._samples[message.token]
        self._held.append(Inspected(message.token, message.window, samples))
        return True

    def release(self, answering: tuple[str, ...], machine: Machine | None = None) -> None:
        """Send what is held. ``answering``: the file systems that answer; ``machine``: the node."""
        held, self._held = self._held, []
        for message in held:
            message.answering, message.machine = answering, machine
            try:
                self._send(message)
            except ValueError:  # larger than a message may be; the samples alone are not
                bare = tuple(
                    msgspec.structs.replace(sample, looks=()) for sample in message.samples
                )
                self._send(msgspec.structs.replace(message, samples=bare))
