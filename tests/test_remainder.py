"""A step on what a job has left: fewer spares first, then places without a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from robust_slurm.slurm import Slurm, SlurmError
from srun_wrapper.layout import StepPlan, plan_step
from srun_wrapper.remainder import corrected, fit, nodes_left
from srun_wrapper.srun_options import UsageError, split
from srun_wrapper.step_request import StepRequest, effective


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
    ("line", "left", "spares"), [("-N2", 3, 0), ("-N2", 2, 0), ("-N2", 3, 1), ("-N1 -n4", 4, 0)]
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


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        (("n1", "n3"), ("n1", "n3")),
        (("n1", "n2", "n3"), ()),
        ((), ()),  # of a job that has just ended
        (SlurmError("unreachable", ["scontrol"], "no answer"), ()),
    ],
)
def test_slurm_is_asked_for_them(
    nodes: Any, found: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    def job(_id: int) -> Any:
        if isinstance(nodes, Exception):
            raise nodes
        return SimpleNamespace(nodes=nodes)

    assert nodes_left(cast(Slurm, SimpleNamespace(job=job)), 7, 3) == found
    assert ("cannot ask Slurm" in capfd.readouterr().err) == isinstance(nodes, Exception)
