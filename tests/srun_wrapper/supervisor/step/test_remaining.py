"""A step on what a job has left: fewer spares first, then places without a node."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from robust_slurm.slurm import Slurm, SlurmError, Step
from srun_wrapper.command.layout import StepPlan, plan_step
from srun_wrapper.command.srun_options import UsageError, split
from srun_wrapper.command.step_request import StepRequest, effective
from srun_wrapper.supervisor.step import remaining
from srun_wrapper.supervisor.step.remaining import Left, corrected, fit, remaining_allocation


def request(line: str, **env: str) -> StepRequest:
    return effective(split([*line.split(), "cmd"], {}), env)


@pytest.mark.parametrize(
    ("line", "left", "spares", "had", "short", "nodes", "tasks"),
    [
        ("", 4, 1, 0, 0, "4", "8"),  # of 5: the spare was used
        ("", 4, 2, 1, 0, "4", "8"),
        ("", 3, 2, 0, 0, "3", "6"),
        ("", 2, 2, 0, 1, "2", "4"),
        ("", 4, 0, 0, 1, "4", "8"),
        ("", 1, 0, 0, 4, "1", "2"),
        ("-n9", 3, 1, 0, 1, "3", "9"),
        ("-N2 -n3", 2, 1, 0, 0, "2", "4"),
    ],
)
def test_what_fits(
    line: str, left: int, spares: int, had: int, short: int, nodes: str, tasks: str
) -> None:
    wanted = request(line, SLURM_NTASKS="10", SLURM_JOB_NUM_NODES="5")
    plan = fit(wanted, 5, left, spares, "2(x5)")
    assert (plan.spares, plan.short) == (had, short)
    assert (plan.options["nodes"], plan.options["ntasks"]) == (nodes, tasks)
    whole = plan_step(wanted, 5, spares) if spares else None
    if whole is not None:
        assert plan.ranks_per_active_node == whole.ranks_per_active_node


@pytest.mark.parametrize(
    ("line", "left", "spares"),
    [("-N2", 3, 0), ("-N2", 2, 0), ("-N2", 3, 1), ("-N1 -n4", 4, 0), ("-n1 -w n1", 2, 0)],
)
def test_a_step_that_was_smaller_than_the_job_stays_as_it_is(
    line: str, left: int, spares: int
) -> None:
    wanted = request(line, SLURM_NTASKS="10", SLURM_JOB_NUM_NODES="5")
    assert fit(wanted, 5, left, spares) == plan_step(wanted, 5, spares)
    assert spares or fit(wanted, 5, left, spares) == StepPlan()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-w n[1-5]", "has 4 of its 5 nodes left, and --nodelist cannot be combined with nodes of"),
        ("-m plane=2", "4 of its 5 nodes left, and --distribution=plane=2 cannot"),
        ("--gpus=8", "4 of its 5 nodes left, and --gpus cannot"),
    ],
)
def test_what_cannot_be_laid_out_anew(line: str, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("[", "[[]")):
        fit(request(line), 5, 4, 0)


@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(0, 30),
    st.none() | st.integers(1, 99), st.none() | st.integers(1, 30),
)  # fmt: skip
def test_every_place_has_a_node_or_is_short(
    allocated: int, left: int, spares: int, ntasks: int | None, active: int | None
) -> None:
    assume(left <= allocated)
    wanted = StepRequest(ntasks_cli=ntasks, nodes_cli=active)
    try:
        plan = fit(wanted, allocated, left, spares)
        whole = plan_step(wanted, allocated, spares)
    except UsageError:
        return
    if plan == whole:
        return
    assert plan.active_nodes is not None and plan.slots_per_node is not None
    nodes = int(plan.options["nodes"])
    assert nodes == left == plan.active_nodes - plan.short + plan.spares
    assert not (plan.short and plan.spares) and plan.short < plan.active_nodes
    assert int(plan.options["ntasks"]) == nodes * plan.slots_per_node
    assert plan.world_size == (ntasks or plan.active_nodes)


def test_the_environment_as_slurm_would_have_made_it() -> None:
    env = {
        "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_NTASKS": "8",
        "SLURM_JOB_CPUS_PER_NODE": "2(x3),8", "HOME": "/home/u",
    }  # fmt: skip
    assert corrected(env, ["n1", "n3", "n4"]) == {
        "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1,3-4]",
        "SLURM_NODELIST": "n[1,3-4]", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "8",
        "HOME": "/home/u",
    }  # fmt: skip
    assert corrected(env, ["n4"])["SLURM_TASKS_PER_NODE"] == "2"
    gpus = {"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "2"}
    made = corrected(env | gpus, ["n1"])
    assert "SLURM_GPUS" not in made and made["SLURM_GPUS_PER_NODE"] == "2"


def test_uneven_tasks_of_a_job_are_known() -> None:
    wanted = request("", SLURM_NTASKS="5", SLURM_JOB_NUM_NODES="3")
    plan = fit(wanted, 3, 2, 0, "3,1(x2)")
    assert (plan.world_size, plan.short) == (5, 1)
    assert plan.ranks_per_active_node == ((0, 1), (2, 3), (4,))


NODES = ("n1", "n2", "n3", "n4")


class Door:
    """Slurm's door with one job; ``refuses``: what its owner may not do any more."""

    def __init__(self, nodes: tuple[str, ...] = NODES, refuses: bool = False) -> None:
        self.record = SimpleNamespace(nodes=nodes, batch_host=nodes[0], start_time=1000.0)
        self.refuses = refuses
        self.kept: list[tuple[str, ...]] = []
        self.sruns: list[tuple[str, int]] = []

    def job(self, _id: int) -> Any:
        return self.record

    def shrink(self, _id: int, keep: tuple[str, ...]) -> None:
        if self.refuses:
            raise SlurmError("conflict", ["scontrol"], "no second update")
        self.kept.append(keep)

    def steps(self, _id: int) -> list[Step]:
        return [Step("7.0", NODES, host, pid) for host, pid in self.sruns]


def looked(door: Any, job_dir: Path, excluded: str | None = None) -> Left | None:
    return remaining_allocation(cast(Slurm, door), 7, job_dir, 4, "n1", excluded)


def swapped(job_dir: Path, *old: str, time: float = 2000.0) -> None:
    record = {"time": time, "symptom": "nan", "swaps": [[name, "s1"] for name in old]}
    with (job_dir / "incidents.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def report_node(job_dir: Path, node: str, symptom: str, time: float = 2000.0) -> None:
    (job_dir / "accusations").mkdir(exist_ok=True)
    record = {"node": node, "symptom": symptom, "time": time}
    (job_dir / "accusations" / f"{node}.7.0-1.json").write_text(json.dumps(record))


def test_what_is_in_the_job_counts(tmp_path: Path) -> None:
    assert looked(Door(), tmp_path) is None
    assert looked(Door(NODES[:2]), tmp_path) == Left(NODES[:2], NODES[:2])


def test_what_should_have_gone_goes_now(tmp_path: Path) -> None:
    """Swapped out, or lost when robust-srun was killed, before the record was written."""
    swapped(tmp_path, "n2")
    report_node(tmp_path, "n3", "node_lost")
    report_node(tmp_path, "n4", "hang")  # blamed, and nothing could replace it
    door = Door()
    assert looked(door, tmp_path) == Left(("n1", "n4"), ("n1", "n4"))
    assert door.kept == [("n1", "n4")]


def test_what_cannot_go_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    swapped(tmp_path, "n2", "n3")
    left = looked(Door(refuses=True), tmp_path, "n9")
    assert left == Left(NODES, ("n1", "n4"), {"exclude": "n9,n2,n3"})
    assert "cannot release n[2-3] from the job" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("host", "parent", "held"),
    [
        ("n1", None, True),  # its srun is gone
        ("n1", "robust-srun", False),  # another one that runs
        ("n2", None, False),  # nobody here knows
        ("n1", "bash", False),  # somebody's srun that does not end
        ("n1", "", True),  # left by a robust-srun that was killed, and ending
    ],
)
def test_a_step_that_has_ended_and_holds_its_nodes(
    host: str, parent: str | None, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(NODES[:3])
    monkeypatch.setattr(remaining, "ENDING", 20.0 if parent == "" else 0.3)
    with contextlib.ExitStack() as stack:
        pid = 1 << 22
        if parent is not None:
            script = f"sleep {0.5 if parent == '' else 30}; exit"
            monkeypatch.setattr(remaining, "SRUN", "sh")
            ours = Path(sys.executable).name if parent == "robust-srun" else "never"
            monkeypatch.setattr(remaining, "OURS", ours)
            srun = stack.enter_context(subprocess.Popen(["sh", "-c", script]))
            stack.callback(srun.kill)
            if not parent:
                stack.callback(srun.wait)
                threading.Thread(target=srun.wait).start()  # as init does
            pid = srun.pid
        door.sruns = [(host, pid)]
        found = looked(door, tmp_path)
    assert found == Left(NODES[:3], NODES[:3], {"overlap": None} if held else {})


def test_the_batch_host_stays_and_has_no_ranks(tmp_path: Path) -> None:
    swapped(tmp_path, "n1")
    door = Door()
    assert looked(door, tmp_path) == Left(NODES, NODES[1:], {"exclude": "n1"})
    assert door.kept == []


def test_what_an_earlier_run_of_the_job_wrote_is_past(tmp_path: Path) -> None:
    swapped(tmp_path, "n2", time=900.0)
    report_node(tmp_path, "n3", "node_lost", time=900.0)
    assert looked(Door(), tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": 1}', '{"time": "x"}', '{"swaps": 3}'])
def test_what_is_no_record_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "incidents.jsonl").write_text(f"{text}\n")
    swapped(tmp_path, "n4")
    found = looked(Door(), tmp_path)
    assert found is not None and found.usable == NODES[:3]


def test_slurm_that_does_not_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Silent(Door):
        def job(self, _id: int) -> Any:
            raise SlurmError("unreachable", ["scontrol"], "no answer")

    assert looked(Silent(), tmp_path) is None
    assert "cannot get the " in capfd.readouterr().err
