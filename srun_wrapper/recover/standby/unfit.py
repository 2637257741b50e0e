"""Standby nodes that did not run robust-task, and what was seen of each."""

from __future__ import annotations

from srun_wrapper.job.reporting.report import say
from srun_wrapper.recover.standby.request import StandbyRequest

SIGNALLED = 128  # srun's exit code, less the signal, for a task that died of one


class UnfitNodes:
    """Keeps what was seen: such a node is not requested again, and is reported once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, str]] = {}  # standby node: allocation, what was seen
        self._unreported: set[str] = set()
        self._lacking: set[str] = set()  # robust-task ran there

    def names(self) -> list[str]:
        """Nodes that are not requested again."""
        return list(self._seen)

    def lines(self) -> list[str]:
        """Say what was seen of each."""
        return [f"{name}: {what}" for name, (_, what) in self._seen.items()]

    def note(self, node: str, job: int, what: str) -> None:
        self._seen[node] = (job, what)

    def note_ended(self, request: StandbyRequest) -> None:
        """Note an srun that ended before robust-task reported: a reason to look at its node."""
        code = request.process.returncode if request.process is not None else None
        if request.lease and code is not None and code > SIGNALLED:
            return  # Slurm took it back while it was being started
        what = f"srun ended before robust-task reported (exit code {code})"
        self.note(request.node, request.job, what)
        if not request.lease:  # it may have ended because Slurm took it back
            self.report(request.node)

    def note_silent(self, request: StandbyRequest, now: float) -> None:
        seconds = now - (request.runs_since or now)
        what = f"no message from robust-task {seconds:.0f} s after Slurm started it "
        what += "(if it is only slow, raise standby_start_limit)"
        self.note(request.node, request.job, what)

    def note_lacking(self, node: str, job: int, what: str, *, certain: bool) -> None:
        """Note a node that lacks a file that its ranks need."""
        self.note(node, job, what)
        self._lacking.add(node)
        if certain:
            self.report(node)

    def forget(self, node: str) -> None:
        self._seen.pop(node, None)

    def report(self, node: str) -> None:
        """Have it reported when the requests are over."""
        self._unreported.add(node)

    def to_report(self, came: bool) -> dict[str, tuple[int, str]]:
        """Nodes to report: allocation, and what was seen; once each.

        Empty where several failed and no node came: then they share a cause.
        """
        # Not a node that joined after all, by another request.
        names, self._unreported = self._unreported & self._seen.keys(), set()
        if not came and len(names) > 1:
            if where := ", ".join(sorted(names - self._lacking)):
                say(
                    f"robust-task did not run on {where}: srun's own lines above say why. No "
                    "Python there: set task_python; a credential that is expired or rewound: a "
                    "clock is wrong"
                )
            return {}
        return {name: self._seen[name] for name in names}
