"""--robust-place and --robust-mesh as robust-srun takes them, with a made-up job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from made_job import KeptJournal, made_launch, made_node

from robust_slurm.config import Config
from srun_wrapper.command.srun_options import UsageError
from srun_wrapper.job import topology
from srun_wrapper.job.model import Role
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology, layout

TREE = """SwitchName=w0 Level=1 Nodes=n[1-6] Switches=w[1-2]
SwitchName=w1 Level=0 Nodes=n[1,3,5]
SwitchName=w2 Level=0 Nodes=n[2,4,6]
"""
C10D = ("torchrun", "--rdzv-backend=c10d", "train.py")


BAD_MESHES = ["8", "pp", "pp=", "pp=0", "pp=-2", "pp=2,pp=2", "=4", "pp=²", "dp=1000,pp=1001"]


@pytest.mark.parametrize("text", [*BAD_MESHES, "dp=" + 5000 * "9"])
def test_bad_meshes(text: str) -> None:
    with pytest.raises(UsageError, match="--robust-mesh="):
        topology.check(text, 0.3)


def test_a_weight_is_a_share() -> None:
    with pytest.raises(UsageError, match="--robust-place-alpha"):
        topology.check("", 1.5)


@pytest.mark.parametrize(
    ("mesh", "ranks", "command", "expected"),
    [
        ({"pp": 2, "dp": 2}, ((0, 1), (2, 3)), "python", ((0, 1), (2, 3))),
        ({"pp": 2, "dp": 8}, ((0,), (1,)), "torchrun t.py", 8),  # it starts 8 in each
        ({"pp": 2, "dp": 8}, ((0,), (1,)), "python t.py", ((0,), (1,))),
        ({"dp": 2}, ((0,), (1,)), "torchrun t.py", 1),
        ({"dp": 3}, ((0,), (1,)), "torchrun t.py", ((0,), (1,))),  # a mesh of something else
        ({}, ((0,), (1,)), "torchrun t.py", ((0,), (1,))),
    ],
)
def test_ranks_of_places(mesh: dict[str, int], ranks: Any, command: str, expected: Any) -> None:
    assert layout(mesh, ranks, command.split()) == expected


class Job:
    """A job whose nodes are n1 … in Slurm's order."""

    def __init__(
        self,
        mesh: str = "",
        ranks: int = 1,
        places: int = 4,
        nodes: int = 4,
        tree: str = TREE,
        command: tuple[str, ...] = ("python",),
        slots: int = 1,
    ) -> None:
        self.state = JobState(Config(place=True, mesh=mesh, place_alpha=0.0), 12, "n1")
        for i in range(nodes):
            node = made_node(i, ranks if i == 0 else slots, Role.SPARE, f"n{i + 1}")
            self.state.members.join(node)
        own = [tuple(range(ranks * i, ranks * (i + 1))) for i in range(places)]
        self.state.members.lay_out(list(self.state.nodes.values())[:places], own)
        self.journal = KeptJournal()
        self.network = Topology(
            self.state.members,
            self.state.config,
            made_launch(*command),
            self.journal,
            lambda: tree,
            dict,
        )

    def start(self) -> list[str]:
        async def first() -> None:
            self.network.learn()
            await self.network.arrange_first()

        asyncio.run(first())
        return self.names

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.state.world.places]


@pytest.mark.parametrize(
    ("job", "nodes", "said"),
    [
        (Job("dp=2,pp=2"), "n1 n3 n2 n4", "per PP group: 1 (were 1 and 2)"),
        (Job("pp=2,dp=2"), "n1 n2 n3 n4", "order is kept"),
        (Job("dp=2,pp=2,tp=8", command=("torchrun", "t.py")), "n1 n3 n2 n4", "ordered by"),
        (Job("dp=3,pp=2", ranks=2, slots=2, places=3, nodes=6), "n1 n3 n5", "ordered by"),
        (Job(places=3, nodes=6), "n1 n3 n5", "per DP group: at most 1"),
        (Job("dp=2,pp=2", tree=""), "n1 n2 n3 n4", "no topology"),
        (Job("dp=2,pp=2", command=C10D), "n1 n2 n3 n4", "numbers its nodes itself"),
        (Job("dp=4,pp=2", ranks=2, slots=1), "n1 n2 n3 n4", "different numbers of tasks"),
        (Job("dp=3"), "n1 n2 n3 n4", "--robust-mesh=dp=3 describes 3 ranks, the job has 4"),
    ],
)
def test_the_first_order(
    job: Job, nodes: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert job.start() == nodes.split()
    assert said in capfd.readouterr().err
    assert len(job.journal.named("placed")) == ("n1 n2" not in nodes)


def test_an_error_of_ours_in_reading_it_costs_the_order_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All replicas wait for the same reading."""
    job = Job("dp=2,pp=2")

    def broken() -> str:
        raise KeyError("SwitchName")

    job.network = Topology(
        job.state.members, job.state.config, made_launch("python"), job.journal, broken, dict
    )
    assert job.start() == ["n1", "n2", "n3", "n4"]
    assert "no topology: internal error: KeyError: 'SwitchName'" in capfd.readouterr().err
    assert job.journal.told


def test_after_a_swap_only_for_a_better_one() -> None:
    job = Job("dp=2,pp=2", nodes=6)
    assert job.start() == ["n1", "n3", "n2", "n4"]
    spares = {node.name: node for node in job.state.spares()}
    job.state.world.places[1] = spares["n5"]  # the same switch: nobody moves
    asyncio.run(job.network.arrange())
    assert job.names == ["n1", "n5", "n2", "n4"]
    job.state.world.places[0] = spares["n6"]  # n6 n5 | n2 n4: no order is better
    asyncio.run(job.network.arrange())
    assert job.names == ["n6", "n5", "n2", "n4"]
    job.state.world.places[3] = spares["n3"]  # n6 n5 | n2 n3: two change seats
    asyncio.run(job.network.arrange())
    assert sorted(job.names[:2]) in (["n2", "n6"], ["n3", "n5"])
    assert sum(a == b for a, b in zip(job.names, ["n6", "n5", "n2", "n3"], strict=True)) == 2
    assert len(job.journal.named("placed")) == 2
