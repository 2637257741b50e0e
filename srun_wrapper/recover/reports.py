"""Reports against nodes that left the job, and their withdrawal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.decide.diagnosis import Cause
from srun_wrapper.decide.exclusions import BadNode, Strength, remembered
from srun_wrapper.decide.flaps import WINDOW, Flap
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.model import AgentKey, Node
from srun_wrapper.job.reporting.report import say
from srun_wrapper.recover.flaps import Flaps
from srun_wrapper.recover.standby.request import Barred


class _Lost(NamedTuple):
    """A node that was given up for its silence."""

    incident: Incident
    since: float  # its last word
    stands: bool  # tests have named it: no outage explains that


class Reports:
    """Knows the job's bad nodes, and reports them to the gate of their nodes.

    A node that fell silent is reported only when it is no longer waited for. If it was unreachable
    and answers again at once, its report is withdrawn, unless that has happened before.
    """

    def __init__(self, nodes: Mapping[AgentKey, Node], ledger: JobLedger, user: str) -> None:
        self._nodes = nodes
        self._ledger = ledger
        self._user = user
        self._bad: list[str] = []  # every node that ever left this job, less those acquitted
        self._made: dict[str, tuple[str, int]] = {}  # node -> incident, job of the report
        self._remembered = remembered(ledger.dir)  # of earlier runs and steps
        self._seen: dict[str, BadNode] = {}  # of this step
        self._silent: dict[AgentKey, _Lost] = {}  # reported if they do not come back
        self.flaps = Flaps(self._answers_again)
        self._shared: set[str] = set()  # lost by a cause that may be shared: not bad
        self._slow: set[str] = set()  # reported as slow
        self.barred = Barred(self._bad, self._remembered)

    def judge(self, node: Node, incident: Incident) -> None:
        """Record why a node leaves the job; report it if the evidence is against it."""
        name = node.name
        proven = name in incident.diagnosis.proven
        if name in self._bad:
            if proven and name not in self._shared and not self._proven(name):
                self._seen[name] = BadNode(name, Strength.PROVEN, incident.wall)
                self._report(node, incident)  # it had stayed, as nothing could replace it
            return
        if node.stalled and not node.own_mount and not proven:  # its server may be away
            self._shared.add(name)
            return
        self._bad.append(name)
        self._shared.discard(name)
        strength = Strength.PROVEN if proven else Strength.ONCE
        self._seen[name] = BadNode(name, strength, incident.wall)
        if node.own_mount:
            self._report(node, incident)
        elif name in incident.diagnosis.unreported or (_mute(node) and not proven):
            self._shared.add(name)
        elif node.silent_as is not None:
            self._silent[node.key] = _Lost(incident, node.last_word, proven)
        elif not node.ours:
            self._report(node, incident)

    def _proven(self, name: str) -> bool:
        return name in self._seen and self._seen[name].strength is Strength.PROVEN

    def stays(self, name: str) -> None:
        """Note that a suspect stays, as nothing could replace it.

        If it was not reported, what it does next is judged anew.
        """
        if name in self._shared and name in self._bad:
            self._shared.remove(name)
            self._bad.remove(name)

    def came_back(self, node: Node) -> None:
        """Note that a lost node answers again before it was replaced."""
        lost = self._silent.pop(node.key, None)
        if lost is not None and not lost.stands:
            self.flaps.note(node.name, Flap(lost.since, time.monotonic()))
        self._shared.discard(node.name)
        if node.name in self._bad:
            self._bad.remove(node.name)

    def report_silent(self) -> None:
        """Report the nodes that were lost and have not come back; they are no longer awaited."""
        for key, lost in self._silent.items():
            node, now = self._nodes[key], time.monotonic()
            before = self.flaps.before(node.name, now)
            self._report(node, lost.incident, before.text(node.name, now) if before else "")
            if not lost.stands:
                self.flaps.watch(node, lost.since)
        self._silent.clear()
        for node in self._nodes.values():
            node.silent_as = None

    def _answers_again(self, node: Node, flap: Flap) -> None:
        """Handle an answer of a node reported as unreachable, before it could have booted."""
        name, lasted = node.name, flap.until - flap.since
        before = self.flaps.before(name, flap.until)
        self.flaps.note(name, flap)
        if before is None:
            why = f"it answered again after {lasted:.1f} s, too soon for a reboot: a network outage"
            why += f"; a second one within {WINDOW / 60:g} min would stand"
            self.withdraw((name,), why, "transient")
        elif self.reported(name):
            text = before.text(name, flap.until)
            say(f"{name} answers again after {lasted:.1f} s, but its report stands: {text}")

    def _report(self, node: Node, incident: Incident, more: str = "") -> None:
        """Write the report; ``more``: evidence that is not the incident's."""
        diagnosis, mount = incident.diagnosis, node.own_mount
        alone = f"file system {mount} does not answer on {node.name} alone"
        record = self._record(
            node.job_id,
            incident.wall,
            "mount_silent" if mount else diagnosis.symptom,
            [alone] if mount else [*diagnosis.evidence, *([more] if more else ())],
            "own-mount" if mount else diagnosis.rule,
        )
        record["proven"] = node.name in diagnosis.proven
        self._ledger.report_node(node.name, incident.id, record)
        self._made[node.name] = (incident.id, node.job_id)

    def _record(
        self, job: int, wall: float, symptom: str, evidence: list[str], rule: str
    ) -> dict[str, Any]:
        return {
            "job": job,
            "user": self._user,
            "time": wall,
            "symptom": symptom,
            "evidence": evidence,
            "rule": rule,
        }

    def report_slow(
        self, node: Node, number: str, wall: float, evidence: Sequence[str], rule: str
    ) -> None:
        """Report a node that makes the job slow and has a fault; it stays in the job."""
        if node.name in self._slow:
            return
        self._slow.add(node.name)
        record = self._record(node.job_id, wall, "slow", list(evidence), rule)
        self._ledger.report_node(node.name, number, record)

    def report_unfit(self, unfit: Mapping[str, tuple[int, str]], incident: Incident) -> None:
        """Report the standby nodes that did not run robust-task: a reason to look at them."""
        for name, (job, what) in unfit.items():
            seen, rule = [f"{name}: {what}"], "standby-unfit"
            record = self._record(job, time.time(), "standby_unfit", seen, rule)
            self._ledger.report_node(name, incident.id, record)

    def withdraw(self, names: tuple[str, ...], why: str, cause: Cause) -> None:
        """Take back wrong reports: the gate drops them, and the nodes may be used again.

        ``cause``: of the reports' incidents, as it is known now.
        """
        for name in names:
            if name in self._bad and (report := self._made.pop(name, None)):
                self._bad.remove(name)
                self._ledger.withdraw(name, *report, why, cause)
                say(f"the report against {name} is withdrawn: {why}")

    def reported(self, name: str) -> bool:
        """True if a report against the node stands."""
        return name in self._made

    def not_bad(self) -> tuple[str, ...]:
        """Nodes that were lost by a cause that they may share."""
        return tuple(self._shared)

    def evidence(self) -> list[BadNode]:
        """Nodes that the job should not get again, with those of its earlier runs."""
        found = {one.node: one for one in self._remembered}
        for name in (name for name in self._bad if name not in self._shared):
            one, before = self._seen[name], found.get(name)
            found[name] = before.again(one.strength, one.time) if before else one
        return list(found.values())


def _mute(node: Node) -> bool:
    """True if its kernel answered all the time: its processes may just have been stopped."""
    return node.silence is not None and node.silence.kind == "mute"
