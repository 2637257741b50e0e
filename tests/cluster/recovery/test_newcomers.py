"""Standby nodes that lack what the job needs: the program's files, its data, a library."""

from __future__ import annotations

import shutil

from conftest import LabFactory
from jobs import TOY, Training, prepared

from lab import Cluster


def training_of(lab: Cluster, toy: str, robust: str = "", nodes: int = 2) -> Training:
    """A training of two ranks whose script has a directory of its own."""
    training = prepared(lab, 2)
    program = training.dir / "program"
    program.mkdir(mode=0o755)
    shutil.copy(TOY, program)
    line = training.line(robust.split(), toy.split()).replace(str(TOY), str(program / TOY.name))
    training.submit(line, [f"-N{nodes}", "--ntasks-per-node=1"])
    return training


def hide(lab: Cluster, node: str, path: object) -> None:
    """Have the node see an empty directory there, as where a mount is missing."""
    lab.exec(node, ["mount", "-t", "tmpfs", "none", str(path)], user=False, check=True)


def test_the_program_is_missing_on_a_standby_node(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2, standby=2)
    training = training_of(lab, "--hold 8")
    hide(lab, "s1", training.dir / "program")
    training.wait_step(8)
    lab.crash("n2")
    training.check_done()
    training.only_incident(action="swap_standby", suspects=["n2"], swaps=[["n2", "s2"]])
    assert training.says(r"s1 is passed over: \S*/program/toy.py is not there")
    assert set(training.accusations()) == {"n2", "s1"}
    seen = training.accusations()["s1"]
    assert seen["symptom"] == "standby_unfit" and "toy.py is not there" in seen["evidence"][0]


def test_standby_nodes_and_a_spare_lack_the_home(new_lab: LabFactory) -> None:
    """Slurm starts the tasks in /tmp there, and all files of the job are missing."""
    lab = new_lab(nodes=3, standby=2)
    for node in ("n3", "s1"):
        hide(lab, node, lab.shared)
    training = training_of(lab, "--hold 8", "--robust-spares=1", nodes=3)
    training.wait_says("n3 is passed over")  # before it is needed
    training.wait_step(8)
    lab.crash("n2")
    training.check_done()
    training.only_incident(action="swap_standby", suspects=["n2"], swaps=[["n2", "s2"]])
    assert training.says("s1 is passed over: ")


def test_only_the_program_sees_that_data_is_missing_on_a_standby_node(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2, standby=2)
    data = lab.shared / "data"
    data.mkdir()
    (data / "tokens").write_bytes(b"1")
    hide(lab, "s1", data)
    training = training_of(lab, "--hold 8 --reads $HOME/data/tokens")
    training.wait_step(8)
    lab.crash("n2")
    training.check_done()
    assert [i["swaps"] for i in training.incidents()] == [[["n2", "s1"]], [["s1", "s2"]]]
    assert training.says(f"s1 is passed over: {data}/tokens is not there")
    seen = training.accusations()["s1"]
    assert seen["rule"] == "newcomer-error"
    assert any(f"s1: {data}/tokens is not there" in line for line in seen["evidence"])


def test_an_error_of_the_program_that_hits_on_newcomers_first_ends_the_job(
    new_lab: LabFactory,
) -> None:
    """The second newcomer exchanges its ranks with n1, where the error comes back."""
    lab = new_lab(nodes=2, standby=3)
    epochs = ",".join(map(str, range(2, 20)))
    training = training_of(lab, f"--hold 8 --fault exit --at 6 --epoch {epochs}")
    training.wait_step(8)
    lab.crash("n2")
    assert training.wait_end() == 3, training.story()
    worlds = [event["nodes"] for event in training.events("epoch")]
    assert worlds == [["n1", "n2"], ["n1", "s1"], ["n1", "s2"], ["s2", "n1"]]
    assert set(training.withdrawals()) == {"s1"}
