"""Two pipelines of two stages, a rank on each node: groups of nodes lost at once."""

from __future__ import annotations

import pytest
from ckpt_jobs import Undisturbed, undisturbed
from conftest import LabFactory
from torch_forks import TorchForks

from lab import Cluster


@pytest.fixture(scope="module")
def pipelines(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("pipeline")
    return undisturbed(torch_forks, "ckpt_pipeline.py", directory, world=4, steps=16)


def test_pipeline_lost_then_two_nodes_one_amid_the_recovery_of_the_other(
    new_lab: LabFactory, pipelines: Undisturbed
) -> None:
    lab = new_lab(nodes=8, standby=0)
    training = pipelines.job(lab)
    size = ["-N8", "--ntasks-per-node=1"]
    training.start("--robust-spares=4", "--hold=1:5,2:10", sbatch=size, durable=False)
    training.wait_held(1, 5)
    training.wait_replicas(4)
    training.wait_says("survive the loss of any 1 node, .*any 1 pipeline group")
    for node in ("n3", "n4"):  # ranks 2 and 3: the second pipeline
        lab.partition(node)  # at once: a crash waits until all of the node's processes are gone
    lab.crash("n3")
    lab.crash("n4")
    training.wait_held(2, 10)
    training.until(training.incidents, "its incident")
    first = training.incidents()[0]
    taken = dict(map(tuple, first["swaps"]))
    assert set(taken) == {"n3", "n4"}, first
    lab.crash("n2")  # rank 1
    training.until(lambda: len(training.events("failure")) > 1, "failure noticed")
    lab.crash(taken["n4"])  # rank 3
    training.check_ended()
    found = training.incidents()
    assert found[-1]["outcome"] == "recovered"
    training.check_lost(len(found))
    swapped = {old for record in found for old, _ in record["swaps"]}
    assert swapped == {"n2", "n3", "n4", taken["n4"]}


def test_torchrun_with_a_pipeline_on_each_node(new_lab: LabFactory, pipelines: Undisturbed) -> None:
    """Several ranks in one task; the loss of a node is that of a pipeline.

    c10d numbers nodes by name: the newcomer becomes the first, and all ranks change their node.
    """
    lab = new_lab(nodes=1, standby=2)
    training = pipelines.job(lab)
    torchrun = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    torchrun += " --rdzv-endpoint=$(hostname):29513 --max-restarts=1 "
    torchrun += training.words("--apart", "--hold=1:5")
    command = f"robust-srun --robust-standby-partition=train {torchrun}"
    training.submit(command, ["-pstandby", "-N2", "--ntasks-per-node=1", "-c2"])
    training.wait_held(1, 5)
    training.wait_replicas(4)
    lab.crash("s2")
    training.check_ended()
    (record,) = training.check_lost(1)
    assert (record["action"], record["swaps"]) == ("swap_standby", [["s2", "n1"]])
    assert training.says("--max-restarts=1 is set to 0"), training.out()
    (moved,) = training.events("unexpected_seat")
    assert moved["node"] in ("n1", "s1"), training.story()


def test_survivors_change_seats_for_the_network(pipelines: Undisturbed) -> None:
    """The mesh is known from the Checkpointer, so only the second order is the network's.

    n2 and n3 exchange their ranks, and each rank its snapshot, while s1 comes in place of n4.
    """
    with Cluster(nodes=4, standby=1, switches=["n[1,3]", "n[2,4],s1"]) as lab:
        training = pipelines.job(lab)
        place = "--robust-place --robust-place-alpha=0"
        training.start(place, "--hold=1:5", sbatch=["-N4", "--ntasks-per-node=1"], durable=False)
        training.wait_held(1, 5)
        training.wait_replicas(4)
        lab.crash("n4")
        training.check_ended()
        (record,) = training.check_lost(1)
        assert record["swaps"] == [["n4", "s1"]]
        orders = [epoch["nodes"] for epoch in training.events("epoch")]
        assert orders == [["n1", "n2", "n3", "n4"], ["n1", "n3", "n2", "s1"]]
