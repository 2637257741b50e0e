"""Attempts to start the job's step, by the answers of a small step of srun."""

from __future__ import annotations

import pytest

from srun_wrapper.supervisor.step.asking import Answer, read_answer
from srun_wrapper.supervisor.step.attempts import PAUSES, Attempts, shares

DEAD = """\
srun: error: Task launch for StepId=2.1 failed on node n4: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
"""
MUTE = DEAD.replace("Communication connection failure", "Socket timed out on send/recv operation")
NAMED = {"n4": "Communication connection failure"}
EMPTY = "srun: error: n[3-4]: tasks 0-1: Exited with exit code 77\n"
AWAY = "srun: error: Unable to confirm allocation for job 2: Unable to contact slurm controller\n"
CREDENTIAL = "srun: error: Unable to create step for job 2: Error generating job credential\n"
WRONG = "srun: error: Unable to create step for job 2: Invalid generic resource (gres)\n"


@pytest.mark.parametrize(
    ("code", "text", "answer"),
    [
        (0, "", Answer(True)),
        (233, DEAD, Answer(failed=NAMED)),
        (233, DEAD.replace("StepId=", "step "), Answer(failed=NAMED)),
        (77, EMPTY, Answer(empty=("n3", "n4"))),
        (77, EMPTY.replace("77", "127"), Answer()),  # no grep there: nothing is known
        (1, AWAY, Answer(passing=AWAY[13:-1])),
        (1, CREDENTIAL, Answer(passing=CREDENTIAL[13:-1])),
        (1, WRONG, Answer()),
    ],
)
def test_what_srun_prints(code: int, text: str, answer: Answer) -> None:
    assert read_answer(code, text) == answer


def test_a_node_that_srun_does_not_reach_is_left_out_at_once() -> None:
    attempts = Attempts()
    why = attempts.failed(read_answer(233, DEAD), 2, 1)
    assert why.endswith("Communication connection failure: starting again without n4")
    assert attempts.again and not attempts.pause and list(attempts.lost) == ["n4"]


def test_a_node_that_only_does_not_answer_must_be_named_twice() -> None:
    attempts = Attempts()
    assert attempts.failed(read_answer(233, MUTE), 2, 1).endswith("starting again in 2 s")
    assert attempts.again and not attempts.lost and attempts.in_doubt
    assert attempts.failed(read_answer(233, MUTE), 2, 1).endswith("starting again without n4")
    assert list(attempts.lost) == ["n4"] and not attempts.in_doubt


def test_what_all_nodes_show_is_no_nodes_fault() -> None:
    attempts = Attempts()
    for pause in PAUSES:
        assert attempts.failed(read_answer(233, DEAD), 1, 1) and attempts.pause == pause
    assert not attempts.failed(read_answer(233, DEAD), 1, 1)
    assert not attempts.again and not attempts.lost


@pytest.mark.parametrize("text", [AWAY, CREDENTIAL])
def test_an_error_of_slurm_is_waited_out_for_some_time(text: str) -> None:
    attempts = Attempts()
    for pause in PAUSES:
        assert attempts.failed(read_answer(1, text), 2, 1).endswith(
            f"starting again in {pause:g} s"
        )
        assert attempts.again
    assert attempts.failed(read_answer(1, text), 2, 1) == "" and not attempts.again


def test_what_is_wrong_for_srun_ends_at_once() -> None:
    for answer in (read_answer(1, WRONG), None):
        attempts = Attempts()
        assert attempts.failed(answer, 2, 1) == "" and not attempts.again


def test_an_error_that_has_passed_is_tried_once_more() -> None:
    attempts = Attempts()
    assert attempts.failed(Answer(True), 2, 1) == "srun gave no reason: trying once more"
    assert attempts.again
    assert attempts.failed(Answer(True), 2, 1) == "" and not attempts.again


@pytest.mark.parametrize("code", [2, 13, 126, 127])
def test_a_robust_task_that_cannot_be_run_anywhere_is_not_tried_again(code: int) -> None:
    attempts = Attempts()
    assert attempts.failed(Answer(True), 2, code) == "" and not attempts.again


def test_a_node_without_its_robust_task_is_lost_late_and_if_seen_twice() -> None:
    """A task that is only slow has a process: srun waits for it, and so do we."""
    attempts, answer = Attempts(), read_answer(77, EMPTY)
    assert attempts.missing(answer, ended=False) == attempts.missing(answer, ended=False) == {}
    assert attempts.missing(answer, ended=True) == {}
    assert set(attempts.missing(answer, ended=True)) == {"n3", "n4"}


def test_a_slurmd_that_restarts_while_the_step_runs_loses_no_node() -> None:
    attempts, dead = Attempts(), read_answer(233, DEAD)
    assert attempts.missing(dead, ended=False) == {} and attempts.in_doubt
    assert attempts.missing(Answer(True), ended=False) == {} and not attempts.in_doubt
    assert attempts.missing(dead, ended=False) == {}
    assert list(attempts.missing(dead, ended=False)) == ["n4"]


@pytest.mark.parametrize(
    ("nodes", "tasks", "known", "dealt"),
    [
        ([1], [2, 3], {0: (0, 1)}, {1: (2, 3)}),
        ([1, 3], [2, 3, 6, 7], {0: (0, 1), 2: (4, 5)}, {1: (2, 3), 3: (6, 7)}),
        ([0, 1], [0, 1, 2], {2: (3,)}, {0: (0, 1), 1: (2,)}),
        ([1, 2], [1, 2, 4, 5], {0: (0, 3)}, {1: (1, 4), 2: (2, 5)}),
    ],
)
def test_tasks_of_nodes_that_have_not_reported(
    nodes: list[int],
    tasks: list[int],
    known: dict[int, tuple[int, ...]],
    dealt: dict[int, tuple[int, ...]],
) -> None:
    assert shares(nodes, tasks, known) == dealt


def test_what_is_seen_twice_of_a_node_is_certain() -> None:
    attempts = Attempts()
    assert attempts.twice({"n4": "silent"}) == {} and attempts.in_doubt
    assert attempts.twice({"n4": "silent", "n5": "silent"}) == {"n4": "silent"}
    assert attempts.without({"n4": "silent"}) == "n4: silent: starting again without n4"
    assert attempts.again and attempts.lost == {"n4": "silent"} and attempts.in_doubt
