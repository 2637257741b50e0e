"""A burn-in around its tests: who may be tested, the reservation, the job, what is recorded."""

from __future__ import annotations

import argparse
import errno
import os
import pwd
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from health import settings
from health.active.burn_in import aftermath, plan, reservation, run
from health.active.burn_in.plan import by_gpus, full_s, job_argv, partition_of, planned
from health.active.burn_in.reservation import refuse_busy, reserved
from health.active.coordinator.procedure import WantedTests
from health.active.coordinator.shares import share
from health.active.judging import records
from health.active_tests import LEVELS, TESTS, Judged, Measured
from health.checks import ALL
from health.commands import BadInput
from health.finding import Finding
from health.gate.active_answer import applying
from health.history import events as history
from health.history import state
from health.node.system import Event
from robust_slurm.slurm import Completed, Slurm
from robust_slurm.slurm.model import node_from

OK = Completed(0, "", "")


class FakeSlurm:
    """A runner for the door: nodes, the jobs on them, reservations."""

    def __init__(self, **states: str) -> None:
        self.states = states
        self.jobs: dict[int, str] = {}  # number -> node
        self.reservations: dict[str, list[str]] = {}
        self.in_use = 0  # so often a reservation is said to be
        self.down = False
        self.cancelled: list[str] = []

    def door(self) -> Slurm:
        return Slurm(self, environ={"PATH": "/usr/bin"})

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        words = [word for word in argv[1:] if word not in ("-a", "-o", "-h")]
        if self.down:
            return Completed(1, "", "slurm_load: Unable to contact slurm controller")
        if argv[0] == "scancel":
            self.cancelled.append(words[-1])
            del self.jobs[int(words[-1])]
            return OK
        if words[:2] == ["show", "topology"]:
            return OK
        if argv[0] == "squeue":
            rows = [self._row(argv[-1], number, node) for number, node in self.jobs.items()]
            return Completed(0, "\n".join(rows), "")
        if words[:2] == ["show", "node"]:
            rows = [f"NodeName={n} State={s} Reason=why" for n, s in self.states.items()]
            return Completed(0, "\n".join(rows), "")
        if words[:2] == ["show", "job"]:
            return Completed(0, "\n".join(map(self._job, self.jobs)), "")
        if words[:2] == ["show", "partition"]:
            rows = ["PartitionName=long State=UP Default=NO Nodes=n[1-4]"]
            rows += ["PartitionName=train State=UP Default=YES Nodes=n[1-3]"]
            rows += ["PartitionName=old State=DOWN Default=NO Nodes=n[1-9]"]
            return Completed(0, "\n".join(rows), "")
        return self._reservation(words)

    def _reservation(self, words: list[str]) -> Completed:
        name = words[1].removeprefix("ReservationName=")
        if words[0] == "create":
            self.reservations[name] = words[2:]
            return OK
        if self.in_use:
            self.in_use -= 1
            return Completed(1, "", "slurm_delete: Requested nodes are busy")
        del self.reservations[name]
        return OK

    def _row(self, columns: str, number: int, node: str) -> str:
        row = {"%A": str(number), "%T": "RUNNING", "%P": "train", "%u": "ada", "%N": node}
        return "|".join((row | {"%U": "7"})[column] for column in columns.split("|"))

    def _job(self, number: int) -> str:
        held = f"Reservation={next(iter(self.reservations))} " if self.reservations else ""
        return f"JobId={number} JobName=x UserId=ada(7) JobState=RUNNING Partition=train {held}"


@pytest.mark.parametrize(
    ("state", "job", "why"),
    [
        ("IDLE", "n1", ""),
        ("ALLOCATED", "n2", "n2: busy with job 5 of ada; wait until it ends"),
        ("IDLE+DRAIN", "n1", "n2: drained (why), and drained nodes run no jobs"),
        ("DOWN", "n1", "n2: DOWN"),
        ("IDLE+MAINTENANCE", "n1", "n2: IDLE+MAINTENANCE"),
        ("IDLE+COMPLETING", "n1", "n2: COMPLETING+IDLE"),
    ],
)
def test_only_idle_nodes(state: str, job: str, why: str) -> None:
    slurm = FakeSlurm(n1="IDLE", n2=state)
    slurm.jobs[5] = job
    if not why:
        refuse_busy(slurm.door(), ["n2"])
        return
    with pytest.raises(BadInput) as caught:
        refuse_busy(slurm.door(), ["n2"])
    assert why in str(caught.value)


def test_a_node_that_slurm_does_not_know() -> None:
    with pytest.raises(BadInput, match="x9: no such node in Slurm"):
        refuse_busy(FakeSlurm(n1="IDLE").door(), ["n1", "x9"])


def test_the_reservation_is_made_and_removed() -> None:
    slurm, said = FakeSlurm(n1="IDLE"), list[str]()
    with reserved(slurm.door(), ["n1", "n2"], 7, False, said.append) as name:
        words = dict(word.split("=") for word in slurm.reservations[name])
        assert words["Flags"] == "MAINT" and words["Nodes"] == "n[1-2]" and words["Duration"] == "7"
    assert slurm.reservations == {}
    assert f"scontrol delete ReservationName={name}" in said[0]


def test_it_is_ours_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(n1="IDLE")
    monkeypatch.setenv("LOGNAME", "somebody")
    with reserved(slurm.door(), ["n1"], 7, False, print) as name:
        assert f"Users={pwd.getpwuid(os.geteuid()).pw_name}" in slurm.reservations[name]


class GoneTerminal:
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        self.write("")


class HungUp(FakeSlurm):
    """SIGHUP once more, while the reservation is being removed."""

    def _reservation(self, words: list[str]) -> Completed:
        if words[0] == "delete":
            os.kill(os.getpid(), signal.SIGHUP)
        return super()._reservation(words)


def test_it_is_removed_when_the_terminal_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = HungUp(n1="IDLE")
    monkeypatch.setattr(sys, "stderr", GoneTerminal())
    with pytest.raises(KeyboardInterrupt), reserved(slurm.door(), ["n1"], 7, False, run.say):
        slurm.jobs[5] = "n1"
        os.kill(os.getpid(), signal.SIGHUP)
        signal.pause()
    assert (slurm.reservations, slurm.cancelled) == ({}, ["5"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_is_removed_after_a_signal_and_its_jobs_with_it(number: int) -> None:
    slurm = FakeSlurm(n1="IDLE")
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), reserved(slurm.door(), ["n1"], 7, False, print):
        slurm.jobs[5] = "n1"
        os.kill(os.getpid(), number)
        signal.pause()
    assert (slurm.reservations, slurm.cancelled) == ({}, ["5"])
    assert signal.getsignal(number) == before


def test_slurm_may_need_a_while_to_let_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "_TICK_S", 0.0)
    slurm = FakeSlurm(n1="IDLE")
    with pytest.raises(ZeroDivisionError), reserved(slurm.door(), ["n1"], 7, False, print):
        slurm.in_use = 3
        raise ZeroDivisionError
    assert slurm.reservations == {}


def test_what_cannot_be_removed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "_TICK_S", 0.0)
    monkeypatch.setattr(reservation, "END_S", 0.0)
    slurm, said = FakeSlurm(n1="IDLE"), list[str]()
    with reserved(slurm.door(), ["n1"], 7, False, said.append) as name:
        slurm.down = True
    assert "may still exist" in said[-1]
    assert f"scontrol delete ReservationName={name}" in said[-1]


def test_it_may_be_kept() -> None:
    slurm = FakeSlurm(n1="IDLE")
    with reserved(slurm.door(), ["n1"], 7, True, print) as name:
        pass
    assert list(slurm.reservations) == [name]


def test_the_partition() -> None:
    slurm = FakeSlurm().door()
    assert partition_of(slurm, ["n1", "n3"]) == "train"
    assert partition_of(slurm, ["n4"]) == "long"
    with pytest.raises(BadInput, match="several runs"):
        partition_of(slurm, ["n1", "n9"])
    assert partition_of(slurm, ["n1"], "long") == "long"
    for asked, why in (
        ("odd", "Slurm has long, old, train"),
        ("old", "not UP"),
        ("train", "contain all"),
    ):
        with pytest.raises(BadInput, match=why):
            partition_of(slurm, ["n4"], asked)


def test_nodes_by_what_they_have() -> None:
    gres = {"a": "gpu:h100:8(S:0-1)", "b": "gpu:8", "c": "(null)", "d": "nic:2,gpu:a:4,gpu:b:4"}
    rows = [{"NodeName": n, "State": "IDLE", "Gres": g} for n, g in gres.items()]
    assert by_gpus(map(node_from, rows)) == {8: ["a", "b", "d"], 0: ["c"]}


def test_the_job_shows_no_key() -> None:
    plan = run.BurnInPlan(
        ("n1",), {}, "train", "/opt/python", WantedTests((), "quick", 60.0), 5, "nobody"
    )
    words = job_argv(plan, "r", 8, ["n1", "n2"], ["true"])
    assert {"--reservation=r", "--gres=gpu:8", "--exclusive", "--nodelist=n1,n2"} <= set(words)
    assert not any("KEY" in word for word in words)
    assert not any("gres" in word for word in job_argv(plan, "r", 0, ["n1"], ["true"]))


def test_every_test_of_a_level_fits() -> None:
    for level in LEVELS:
        names = [test.name for test in TESTS]
        fit = share(names, level, full_s(level))
        assert fit.left_out == ()
        assert fit.seconds == {test.name: test.seconds[level] for test in TESTS}


def options(*words: str) -> argparse.Namespace:
    return run.build_parser().parse_args(list(words))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["n[1-"], "n[1-"),
        (["n1", "--limit", "0"], "above 0"),
        (["n1", "--limit", "nan"], "above 0"),
        (["n1", "--time-limit", "1", "--limit", "90"], "the tests may take 90 s"),
        (["n1", "--python", "python3"], "--python python3: must be the absolute path"),
        (
            ["n1", "--partition", "odd"],
            "--partition odd: no such partition; Slurm has long, old, train",
        ),
    ],
)
def test_bad_input_starts_nothing(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "distrusted", lambda python, seconds: "")
    slurm = FakeSlurm(n1="IDLE")
    with pytest.raises(BadInput) as caught:
        planned(options(*words), settings.defaults(ALL), "quick", slurm.door())
    assert why in str(caught.value) and slurm.reservations == {}


# -- what follows -------------------------------------------------------------------------------

BAD = Finding("FAIL", "node", "active-gemm-wrong", "gpu3", "2 of 9 differ", "service")
JUDGED = Judged(
    {"n1": (BAD,), "n3": (Finding("ERROR", "tool", "active-error", "", "no torch", "none"),)},
    {"n1": ("2 of 9 differ",)},
    frozenset({"n2"}),
    {"n3": ("no torch",)},
    ("memory: needs 4 s, and of 5 s 1 are left", "links: no node has a GPU"),
    12.34,
    tuple(Measured(test, "n2", "cpu") for test in sorted(applying(gpus=False))),
)
NODES = ("n1", "n2", "n3")


def test_what_is_recorded() -> None:
    found = aftermath.results(JUDGED, NODES, "standard")
    base: dict[str, Any] = {"level": "standard", "seconds": 12.3}
    assert found == {
        "n1": base | {"ok": False, "result": "failed", "why": ["2 of 9 differ"]},
        "n2": base
        | {"ok": True, "result": "passed", "ran": ["bitwise", "gemm", "local", "memory"]},
        "n3": base | {"ok": False, "result": "untested", "why": ["no torch"]},
    }


def test_a_node_with_tests_left_out_has_passed_nothing() -> None:
    short = JUDGED._replace(measured=tuple(m for m in JUDGED.measured if m.test != "memory"))
    assert aftermath.results(short, ["n2"], "quick")["n2"] == {
        "level": "quick", "seconds": 12.3, "ok": False, "result": "untested",
        "why": ["memory: needs 4 s, and of 5 s 1 are left"],
    }  # fmt: skip


def test_who_is_drained() -> None:
    site = settings.defaults(ALL)
    found = aftermath.verdicts(JUDGED, NODES, site)
    assert {n: v.reason for n, v in found.items()} == {
        "n1": "robust:node:active-gemm-wrong:gpu3:service:job0"
    }
    off = site._replace(gate={**site.gate, "disabled": ["active-gemm-wrong"]})
    assert aftermath.verdicts(JUDGED, NODES, off) == {}


def test_of_another_node_only_the_shared_file_is_written(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if "pytest" in above.name:
            above.chmod(0o755)
    (tmp_path / "nodes").mkdir(mode=0o755)
    site = settings.defaults(ALL)._replace(state_dir=str(tmp_path))
    events = {node: [aftermath.event({"ok": True})] for node in NODES}
    assert aftermath.write(site, events) == ""
    assert aftermath.write(site, events) == ""
    for node in NODES:
        found = history.parse((tmp_path / "nodes" / f"{node}.jsonl").read_bytes())
        assert [(e.kind, e.boot) for e in found][:1] == [("burn-in", "")]
    (tmp_path / "nodes").rename(tmp_path / "gone")
    assert "n1: " in aftermath.write(site, events)
    assert "state_dir" in aftermath.write(site._replace(state_dir=""), events)


def test_a_file_system_that_hangs_takes_one_deadline_for_all_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "tell", lambda *of: signal.pause())
    begun = time.monotonic()
    found = records.tell("/state", {f"n{i}": [] for i in range(50)}, 0.3)
    assert found == "/state: no answer in 0.3 s" and time.monotonic() - begun < 15  # 50 times 0.3 s


def test_an_event_of_no_boot_is_no_boot() -> None:
    """A node must not seem to have booted once more than it did."""
    events = [Event(1.0, "boot", "b1", {}), Event(2.0, "burn-in", "", {"ok": True})]
    assert state._boots(events, "b2") == ["b1", "b2"]
