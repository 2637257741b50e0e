"""Nodes and tasks of the real step, and each rank's view of the world."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srun_wrapper.command.layout import StepPlan, plan_step
from srun_wrapper.command.rank_env import (
    fold_hosts,
    format_tasks_per_node,
    node_env,
    only_slurm,
    parse_tasks_per_node,
    rank_env,
    world_env,
)
from srun_wrapper.command.srun_options import UsageError, split
from srun_wrapper.command.step_request import StepRequest, effective


def _plan(line: str, env: dict[str, str], nodes: int, spares: int) -> StepPlan:
    request = effective(split([*line.split(), "cmd"], {}), env)
    return plan_step(request, nodes, spares, env.get("SLURM_TASKS_PER_NODE"))


def test_without_spares_nothing_changes() -> None:
    for line in ("", "-N2 -n5 -w n1 -m plane=2", "--multi-prog -r1"):
        plan = _plan(line, {"SLURM_NTASKS": "7"}, 2, 0)
        assert plan == StepPlan()
        command = split([*line.split(), "cmd"], {})
        assert plan.apply(command) == command


BATCH = {"SLURM_NTASKS": "10", "SLURM_NNODES": "5", "SLURM_JOB_NUM_NODES": "5"}


@pytest.mark.parametrize(
    ("line", "env", "spares", "active", "counts", "slots"),
    [
        ("", {}, 1, 4, (1, 1, 1, 1), 1),
        ("", BATCH, 1, 4, (2, 2, 2, 2), 2),
        ("", BATCH, 2, 3, (2, 2, 2), 2),
        ("", {"SLURM_NTASKS_PER_NODE": "8"}, 1, 4, (8, 8, 8, 8), 8),
        ("--ntasks-per-node=3", BATCH, 1, 4, (3, 3, 3, 3), 3),
        ("-N2", BATCH, 1, 2, (2, 2), 2),
        ("-N2-4", BATCH, 1, 2, (2, 2), 2),
        ("-n8", BATCH, 1, 4, (2, 2, 2, 2), 2),
        ("-n7", {}, 1, 4, (2, 2, 2, 1), 2),
        ("-n9", {}, 1, 4, (3, 2, 2, 2), 3),
        ("-N3 -n8", BATCH, 2, 3, (3, 3, 2), 3),
        ("-n2", BATCH, 1, 2, (1, 1), 1),
        ("-n1", {}, 4, 1, (1,), 1),
        ("-m block:cyclic -x n9", BATCH, 1, 4, (2, 2, 2, 2), 2),
        ("-m block,NoPack", BATCH, 1, 4, (2, 2, 2, 2), 2),
        ("-m *:block", BATCH, 1, 4, (2, 2, 2, 2), 2),
    ],
)
def test_plan(
    line: str, env: dict[str, str], spares: int, active: int, counts: tuple[int, ...], slots: int
) -> None:
    plan = _plan(line, env, 5, spares)
    assert plan.ranks_per_active_node is not None
    assert tuple(map(len, plan.ranks_per_active_node)) == counts
    assert (plan.active_nodes, plan.slots_per_node) == (active, slots)
    nodes = active + spares
    assert plan.options == {
        "nodes": str(nodes),
        "ntasks": str(nodes * slots),
        "ntasks-per-node": str(slots),
    }
    assert plan.ranks_per_active_node is not None
    assert [r for ranks in plan.ranks_per_active_node for r in ranks] == list(range(sum(counts)))


def test_cyclic_ranks() -> None:
    plan = _plan("-m cyclic:block -n5 -N2", {}, 3, 1)
    assert plan.ranks_per_active_node == ((0, 2, 4), (1, 3))


def test_apply_replaces_the_users_numbers() -> None:
    command = split("-l -N2 --ntasks=4 -o x cmd".split(), {})  # noqa: SIM905
    plan = plan_step(effective(command, {}), 3, 1)
    assert plan.apply(command).argv() == [
        *("-l", "-o", "x"),
        *("--nodes=3", "--ntasks=6", "--ntasks-per-node=2"),
    ]


@pytest.mark.parametrize(
    ("line", "env", "nodes", "spares", "text"),
    [
        ("", {}, 2, -1, "must be 0 or more"),
        ("", {}, 2, 2, "leaves no node to run on: the allocation has 2 nodes; ask for 3 nodes"),
        ("", {}, 1, 1, "the allocation has 1 node;"),
        ("-N4", {}, 4, 1, "--nodes=4 and --robust-spares=1 need 5 nodes, the allocation has 4"),
        ("", {"SLURM_NTASKS": "7", "SLURM_NNODES": "3"}, 3, 1, "7 tasks do not divide evenly"),
        ("-n0", {}, 3, 1, "--ntasks=0"),
        ("--ntasks-per-node=0", {}, 3, 1, "--ntasks-per-node=0"),
        ("-w n1,n2", {}, 3, 1, "--nodelist cannot be combined .* names the nodes"),
        ("-F file", {}, 3, 1, "--nodefile cannot be combined"),
        ("-r 1", {}, 3, 1, "--relative cannot be combined"),
        ("--multi-prog", {}, 3, 1, "--multi-prog cannot be combined"),
        ("", {"SLURM_SRUN_MULTI": "1"}, 3, 1, "--multi-prog cannot be combined"),
        ("-G 8", {}, 3, 1, "--gpus cannot be combined .* --gpus-per-node"),
        ("-m plane=2", {}, 3, 1, "--distribution=plane=2 cannot be combined"),
        ("-m arbitrary", {}, 3, 1, "--distribution=arbitrary cannot be combined"),
        ("-m block,pack", {}, 3, 1, "pack fills nodes unevenly"),
        ("", {"SLURM_DISTRIBUTION": "plane=4"}, 3, 1, "cannot be combined"),
    ],
)
def test_plan_errors(line: str, env: dict[str, str], nodes: int, spares: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _plan(line, env, nodes, spares)


@given(
    st.integers(2, 40),
    st.integers(1, 40),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 40),
    st.sampled_from([None, "block", "cyclic"]),
)
def test_every_plan_fits(
    nodes: int, spares: int, ntasks: int | None, active: int | None, distribution: str | None
) -> None:
    request = StepRequest(ntasks_cli=ntasks, nodes_cli=active, distribution=distribution)
    try:
        plan = plan_step(request, nodes, spares)
    except UsageError:
        assert spares >= nodes or (active or 1) + spares > nodes
        return
    ranks, slots = plan.ranks_per_active_node, plan.slots_per_node
    assert ranks is not None and slots is not None
    counts = [len(own) for own in ranks]
    assert plan.active_nodes == len(counts)
    assert sum(counts) == plan.world_size == (ntasks or plan.active_nodes)
    assert max(counts) == slots and min(counts) >= max(slots - 1, 1)
    assert sorted(r for own in ranks for r in own) == list(range(sum(counts)))
    assert int(plan.options["nodes"]) == len(counts) + spares <= nodes
    assert int(plan.options["ntasks"]) == int(plan.options["nodes"]) * slots


# ---------------------------------------------------------------- Slurm's notations


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2,1", [1, 2, 1]), ("8(x2),0", [8, 8, 0])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert parse_tasks_per_node(text) == counts
    assert format_tasks_per_node(counts) == text


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2,", "2(3)", " 2", "-1", "2(x3)1"])
def test_bad_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match="not a tasks-per-node list"):
        parse_tasks_per_node(text)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_tasks_per_node_round_trip(counts: list[int]) -> None:
    assert parse_tasks_per_node(format_tasks_per_node(counts)) == counts


HOSTS = [
    (["n1"], "n1"),
    (["n1", "n2", "n3"], "n[1-3]"),
    (["n1", "n9", "n3"], "n[1,9,3]"),
    (["n3", "n2", "n1"], "n[3,2,1]"),
    (["n08", "n09", "n10", "n11"], "n[08-11]"),
    (["n9", "n10"], "n[9-10]"),
    (["n09", "n010"], "n[09,010]"),
    (["n99", "n100"], "n[99-100]"),
    (["gpu-a1", "gpu-a2", "cpu1", "gpu-a3"], "gpu-a[1-2],cpu1,gpu-a3"),
    (["login", "n1", "n2", "x-ib"], "login,n[1-2],x-ib"),
    (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
]


@pytest.mark.parametrize(("names", "folded"), HOSTS)
def test_fold_hosts(names: list[str], folded: str) -> None:
    assert fold_hosts(names) == folded


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol")
def test_scontrol_expands_hosts_to_the_same_order(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    swapped = [f"n{i:04}" for i in range(1250)]
    swapped[17] = "s0003"
    for names in [*(names for names, _ in HOSTS), swapped]:
        run = subprocess.run(
            ["scontrol", "show", "hostnames", fold_hosts(names)],
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert run.stdout.split() == names


# ---------------------------------------------------------------- the ranks' environment


def _world(names: list[str], ranks: list[tuple[int, ...]]) -> list[dict[str, str]]:
    """Environment of every rank, in rank order."""
    shared = world_env(
        names=names,
        ranks=ranks,
        epoch=2,
        master_addr="10.0.0.1",
        master_port=4242,
        restart_reason="node n2 lost",
        resume_step=None,
        job_id=77,
        step_id=0,
    )
    found = {}
    for index, (name, own) in enumerate(zip(names, ranks, strict=True)):
        node = node_env(index=index, name=name, ranks=own)
        for local, rank in enumerate(own):
            found[rank] = {**shared, **node, **rank_env(rank=rank, local=local)}
    return [found[rank] for rank in range(len(found))]


def test_a_rank_sees_the_virtual_world() -> None:
    env = _world(["n1", "n5", "n3"], [(0, 1), (2, 3), (4,)])[3]
    assert env == {
        "SLURM_PROCID": "3",
        "RANK": "3",
        "SLURM_LOCALID": "1",
        "LOCAL_RANK": "1",
        "SLURM_NODEID": "1",
        "NODE_RANK": "1",
        "SLURMD_NODENAME": "n5",
        "SLURM_GTIDS": "2,3",
        "LOCAL_WORLD_SIZE": "2",
        "SLURM_NTASKS": "5",
        "SLURM_NPROCS": "5",
        "SLURM_STEP_NUM_TASKS": "5",
        "WORLD_SIZE": "5",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "n[1,5,3]",
        "SLURM_NODELIST": "n[1,5,3]",
        "SLURM_JOB_NODELIST": "n[1,5,3]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
        "SLURM_JOB_ID": "77",
        "SLURM_JOBID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4242",
        "ROBUST_EPOCH": "2",
        "ROBUST_RESTART_REASON": "node n2 lost",
        "ROBUST_JOB_ID": "77",
    }


def test_an_independent_task_sees_no_world_of_ranks() -> None:
    full = _world(["n1", "n5", "n3"], [(0, 1), (2, 3), (4,)])[3]
    cut = only_slurm(full)
    assert full.keys() - cut.keys() == {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT"),
    }
    assert (cut["SLURM_PROCID"], cut["SLURM_NTASKS"]) == ("3", "5")


def test_values_of_some_worlds_only() -> None:
    assert _world(["a", "b"], [(0, 1), (2, 3)])[0]["SLURM_NTASKS_PER_NODE"] == "2"
    env = world_env(
        names=["a"],
        ranks=[(0,)],
        epoch=1,
        master_addr="a",
        master_port=1,
        resume_step=0,
        job_id="1",
        step_id="0",
    )
    assert env["ROBUST_RESUME_STEP"] == "0" and env["ROBUST_RESTART_REASON"] == ""


def test_cyclic_ranks_in_the_environment() -> None:
    envs = _world(["a", "b"], [(0, 2, 4), (1, 3)])
    assert [e["SLURM_NODEID"] for e in envs] == ["0", "1", "0", "1", "0"]
    assert [e["SLURM_LOCALID"] for e in envs] == ["0", "0", "1", "1", "2"]
    assert envs[0]["SLURM_GTIDS"] == "0,2,4"


def test_ten_thousand_ranks_are_cheap() -> None:
    began = time.process_time()
    envs = _world(
        [f"n{i}" for i in range(1250)], [tuple(range(i, i + 8)) for i in range(0, 10000, 8)]
    )
    assert len(envs) == 10000 and envs[-1]["SLURM_JOB_NODELIST"] == "n[0-1249]"
    assert time.process_time() - began < 2.0
