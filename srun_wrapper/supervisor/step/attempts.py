"""Attempts to start the job's step: whether srun is started again after it has failed, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from robust_slurm.slurm.values import fold
from srun_wrapper.supervisor.step.asking import Answer

PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 60.0)  # s between attempts while Slurm has an error
UNEXPLAINED = 1  # attempts after srun failed and Slurm then started a task on every node
UNABLE = {2, 13, 126, 127}  # exit codes of a robust-task that cannot be run, or of bad usage
NAMED = 2  # times that a node does not start a task before it is lost, if srun reaches it
SIGNALS = range(129, 129 + 64)  # exit codes of an srun, or a step, that a signal has ended


@dataclass(slots=True)
class Attempts:
    """The results of earlier attempts to start the step.

    ``lost``: the evidence by node that cannot start a task. ``again``: the step is to be started
    once more; ``pause``: after so many seconds.
    """

    lost: dict[str, str] = field(default_factory=dict)
    again: bool = False
    pause: float = 0.0
    _named: Counter[str] = field(default_factory=Counter)
    _waits: int = 0
    _unexplained: int = 0

    def failed(self, answer: Answer | None, nodes: int, code: int) -> str:
        """Decide after an srun that did not start the step on ``nodes`` nodes; the reason, or "".

        ``answer``: of an srun that was to start a small program in the same way; ``code``: the exit
        code of the srun that failed.
        """
        self.again, self.pause = False, 0.0
        if answer is None:
            return ""
        lost = self.sure(answer)
        if lost and len(lost) < nodes:
            return self.without(lost)
        if answer.failed or answer.passing:
            seen = answer.passing or "; ".join(f"{n}: {why}" for n, why in answer.failed.items())
            if self._waits >= len(PAUSES):
                return ""
            self.pause = PAUSES[self._waits]
            self._waits += 1
            self.again = True
            return f"{seen}: starting again in {self.pause:g} s"
        if answer.started and code not in UNABLE and self._unexplained < UNEXPLAINED:
            self._unexplained += 1
            self.again = True
            return "srun gave no reason: trying once more"
        return ""

    def sure(self, answer: Answer) -> dict[str, str]:
        """Return the evidence against nodes that do not start a task, where it is certain.

        srun does not reach the node, or the same was seen twice.
        """
        return self.twice(_not_started(answer), answer.dead)

    def missing(self, answer: Answer, *, ended: bool) -> dict[str, str]:
        """Return the same of a step that runs: all must be seen twice, for a slurmd can restart.

        ``ended``: a node without a process of the step counts, too: its robust-task has ended.
        """
        if answer.started:
            self._named.clear()
        found = _not_started(answer)
        if ended:
            gone = "its robust-task has ended, and did not reach robust-srun"
            found |= dict.fromkeys(answer.empty, gone)
        return self.twice(found)

    def twice(self, found: Mapping[str, str], sure: Collection[str] = ()) -> dict[str, str]:
        """Return what was found of nodes for the second time, or is ``sure`` at once."""
        self._named.update(list(found))
        certain = {n: why for n, why in found.items() if n in sure or self._named[n] >= NAMED}
        for name in certain:
            del self._named[name]
        return certain

    def without(self, lost: Mapping[str, str]) -> str:
        """Have the step started again without these nodes; returns the reason."""
        self.lost |= lost
        self.again = True
        why = "; ".join(f"{name}: {text}" for name, text in lost.items())
        return f"{why}: starting again without {fold(lost)}"

    @property
    def in_doubt(self) -> bool:
        """True if a node was named that is not lost yet."""
        return bool(self._named)


def _not_started(answer: Answer) -> dict[str, str]:
    return {node: f"srun cannot start a task there: {why}" for node, why in answer.failed.items()}


def shares(
    nodes: Sequence[int], tasks: Sequence[int], known: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """Return the tasks of each of the nodes (indices in the step) that have not reported.

    ``tasks``: those that no other node has; ``known``: those of the others, which show how srun has
    dealt them out.
    """
    cyclic = any(own[-1] - own[0] >= len(own) for own in known.values() if own)
    if cyclic:
        return {node: tuple(tasks[i :: len(nodes)]) for i, node in enumerate(nodes)}
    low, more = divmod(len(tasks), len(nodes))
    starts = [i * low + min(i, more) for i in range(len(nodes) + 1)]
    return {node: tuple(tasks[starts[i] : starts[i + 1]]) for i, node in enumerate(nodes)}
