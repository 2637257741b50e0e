"""The start of a job: nodes that do not take their task, Slurm's own errors, and wrong programs."""

from __future__ import annotations

import pytest
from conftest import LabFactory
from holds import held_back, let_go, wait_held
from jobs import Training, prepared, start

from lab import Cluster

WAIT = 90.0  # s: srun needs 10 s to give a step up


def check_lost(training: Training, node: str, **expected: object) -> None:
    """The node alone was lost and is reported, with the words of what was seen."""
    record = training.only_incident(symptom="node_lost", suspects=[node], **expected)
    # Once Slurm has noticed, srun does not even try: it waits.
    words = {
        f"{node}: srun cannot start a task there: Communication connection failure",
        f"{node}: Slurm lists it as not responding, and its kernel does not answer",
    }
    assert len(record["evidence"]) == 1 and words.issuperset(record["evidence"])
    assert training.accusations()[node]["evidence"] == record["evidence"]
    assert list(training.accusations()) == [node], training.story()


def test_a_node_that_is_dead_at_launch_is_replaced(new_lab: LabFactory) -> None:
    """Slurm still lists it as idle, and gives it to the job."""
    lab = new_lab(nodes=2, standby=1)
    lab.crash("n2")
    training = start(lab, 2)
    training.check_done(timeout=WAIT)
    check_lost(training, "n2", action="swap_standby", swaps=[["n2", "s1"]])
    assert training.nodes() == "n1"


def test_a_spare_comes_before_a_standby_node(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3, standby=1)
    lab.crash("n2")
    training = start(lab, 2, 2, spares=1)
    training.check_done(timeout=WAIT)
    check_lost(training, "n2", action="swap_spare", swaps=[["n2", "n3"]])


def test_without_another_node_the_job_is_requeued(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3, standby=0, AuthInfo="cred_expire=5")
    lab.crash("n2")
    training = start(lab, 2)
    training.wait_says(r"^robust-srun: .*: the job is requeued without n2$", WAIT)
    training.until(lambda: training.runs() == [["n1", "n3"]], "second run", WAIT)
    training.check_done(timeout=WAIT)


def test_a_node_that_dies_while_the_step_starts(new_lab: LabFactory) -> None:
    """srun has started its task, and robust-task has not reported yet."""
    lab = new_lab(nodes=2, standby=1)
    training = prepared(lab, 2)
    training.submit(training.line([held_back(training, "n2")], []), ["-N2"])
    wait_held(training)
    lab.crash("n2")
    training.check_done(timeout=WAIT)
    check_lost(training, "n2", action="swap_standby", swaps=[["n2", "s1"]])


def held_script(training: Training) -> None:
    """Submit a script that starts robust-srun only after ``let_go``."""
    hold = f"touch {training.dir}/held; until [ -e {training.dir}/go ]; do sleep 0.1; done"
    training.submit(f"{hold}\n{training.line([], [])}", ["-N2"])
    wait_held(training)


def test_a_dead_node_for_which_srun_waits(new_lab: LabFactory) -> None:
    """Slurm has noticed by then that the node does not respond, and creates no step there."""
    lab = new_lab(nodes=2, standby=1)
    lab.crash("n2")
    training = prepared(lab, 2)
    held_script(training)
    silent = lambda: "NOT_RESPONDING" in lab.node_records()["n2"]["State"]  # noqa: E731
    training.until(silent, "n2 does not respond", WAIT)
    let_go(training)
    training.check_done(timeout=WAIT)
    check_lost(training, "n2", action="swap_standby", swaps=[["n2", "s1"]])


def test_slurmctld_away_at_the_start(new_lab: LabFactory) -> None:
    """srun gives up at once, robust-srun tries again."""
    lab = new_lab(nodes=2, standby=0)
    training = prepared(lab, 2)
    held_script(training)
    lab.daemon("head", "slurmctld", "freeze")
    let_go(training)
    training.wait_says(r"^robust-srun: srun could not start the step .*: starting again in ", WAIT)
    lab.daemon("head", "slurmctld", "thaw")
    training.check_done(timeout=WAIT)
    assert not training.incidents() and not training.accusations()


@pytest.fixture(scope="module")
def two() -> Cluster:
    with Cluster(nodes=2, standby=0) as cluster:
        yield cluster


PROGRAMS = {  # what ends a program on all nodes before its first step
    "python nosuch.py": 2,
    "python -c 'import nosuch'": 1,
    "python -c 'a b'": 1,
    "python -c 'open(\"nosuch\")'": 1,
    "python -c 'import sys; sys.exit(\"text\")'": 1,
    "python -m json.tool --nosuch": 2,
    "python -c 'import os; os.abort()'": 134,
    "bash -c 'echo oops $SLURM_PROCID >&2; exit 3'": 3,
    "bash -c nosuch": 127,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_fails_everywhere_ends_as_under_srun(two: Cluster, program: str) -> None:
    """robust-srun starts it once; exit code and stderr are srun's, with our lines apart."""
    training = prepared(two, 2)
    body = [
        f"{name} {program} >{name}.out 2>{name}.err; echo $? >{name}.code"
        for name in ("srun", "robust-srun")
    ]
    training.submit("\n".join(["unset ROBUST_STOP_TESTS", *body]), ["-N2"])
    assert training.wait_end() == 0
    codes = [int((training.dir / f"{name}.code").read_text()) for name in ("srun", "robust-srun")]
    assert codes == [PROGRAMS[program]] * 2, training.story()
    assert len(training.events("epoch")) == 1, training.story()
    (ours,) = [line for line in said(training, "robust-srun") if line.startswith("robust-srun: ")]
    assert "on all ranks before its first step" in ours
    assert theirs(training, "robust-srun") == theirs(training, "srun")
    assert not training.accusations()


def said(training: Training, name: str) -> list[str]:
    return (training.dir / f"{name}.err").read_text().splitlines()


def theirs(training: Training, name: str) -> list[str]:
    """The program's own lines; srun calls it by its path."""
    lines = [line for line in said(training, name) if "srun: " not in line]
    return sorted(
        line.partition("bash: ")[2] or line.partition("python: ")[2] or line for line in lines
    )


def test_one_rank_that_fails_at_the_start_is_restarted(two: Cluster) -> None:
    """The rank's node may be at fault: the others do not show it."""
    training = start(two, 2, toy="--fault exit --at 1 --once")
    training.check_done()
    training.only_incident(symptom="crash", action="restart")
