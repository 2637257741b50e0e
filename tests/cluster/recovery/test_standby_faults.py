"""Standby nodes that are bad, a Slurm that is away, and spares that stumble."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conftest import LabFactory
from jobs import check_incident, prepared, start

from lab import Cluster

PYTHON = "/tmp/robust-python"  # every node has a /tmp of its own


def python_on(lab: Cluster, nodes: Sequence[str], program: str = sys.executable) -> str:
    """Have a python for robust-task on these nodes only; the option that names it."""
    script = f"""printf '#!/bin/sh\\nexec {program} "$@"\\n' > {PYTHON}; chmod 755 {PYTHON}"""
    for node in nodes:
        lab.exec(node, ["sh", "-c", script], check=True)
    return f"--robust-task-python={PYTHON}"


def test_bad_standby_nodes_are_passed_over(new_lab: LabFactory) -> None:
    """s1 has no python, robust-task hangs on s2, s3 is well."""
    lab = new_lab(nodes=2, standby=3)
    robust = python_on(lab, ["n1", "n2", "s3"])
    python_on(lab, ["s2"], "sleep 600 #")
    training = start(lab, 2, robust=robust, toy="--hold 8")
    training.wait_step(8)
    lab.crash("n2")
    training.check_done()
    training.only_incident(action="swap_standby", suspects=["n2"], swaps=[["n2", "s3"]])
    found = training.accusations()
    assert set(found) == {"n2", "s1", "s2"}
    assert found["s1"]["symptom"] == found["s2"]["symptom"] == "standby_unfit"
    assert "srun ended before robust-task reported (exit code 2)" in found["s1"]["evidence"][0]
    assert "no message from robust-task" in found["s2"]["evidence"][0]
    assert found["s1"]["job"] != training.job  # it is the standby allocation's to be looked for


def test_standby_nodes_that_cannot_start_a_rank_cost_no_budget(new_lab: LabFactory) -> None:
    """The standby nodes lack the program; the last rung is taken all the same."""
    lab = new_lab(nodes=3, standby=2)
    python_on(lab, ["n1", "n2", "n3"])
    training = prepared(lab, 2)
    line = training.line(["--robust-max-restarts=1"], ["--hold", "8"])
    program = line.replace(" python ", f" {PYTHON} ", 1)
    training.submit(program, ["-N2", "--ntasks-per-node=1"])
    training.wait_step(8)
    lab.crash("n2")
    training.until(lambda: len(training.runs()) > 1, "second run")  # the first is COMPLETING before
    training.check_done()
    assert training.runs()[1] == ["n1", "n3"]
    assert training.says(f"s1 is passed over: {PYTHON} is not there"), training.out()
    check_incident(training.incidents()[-1], action="requeue", outcome="requeued")


def test_slurmctld_is_away_during_a_swap(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=2, standby=1)
    training = start(lab, 2, toy="--hold 8")
    training.wait_step(8)
    lab.daemon("head", "slurmctld", "freeze")
    try:
        lab.crash("n2")
        training.wait_says("robust-srun: Slurm does not answer .* to get a standby node")
    finally:
        lab.daemon("head", "slurmctld", "thaw")
    training.check_done()
    training.only_incident(action="swap_standby", suspects=["n2"], swaps=[["n2", "s1"]])
    assert training.says("robust-srun: Slurm answers again after")
