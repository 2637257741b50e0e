"""Programs that save their state by themselves: what a restart cost them, in true words."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from jobs import REPOSITORY, Training, prepared

from lab import Lab

PROGRAM = REPOSITORY / "tests" / "programs" / "own_saves.py"


def run(lab: Lab, robust: str, *options: str) -> Training:
    """Run the program on two nodes to its end; it saves step 20 and dies after step 25."""
    training = prepared(lab, 2)
    words = ["robust-srun", robust, "python", str(PROGRAM), f"--dir={training.dir}", *options]
    training.submit(" ".join(words), ["-N2", "--ntasks-per-node=1"])
    assert training.wait_end(120.0) == 0, training.story()
    return training


def asked(training: Training, *options: str) -> str:
    argv = ["robust-status", "--state-dir", str(training.state), *options]
    return training.lab.exec("head", argv, user=False).stdout


def test_a_program_whose_steps_are_not_seen(lab: Lab) -> None:
    training = run(lab, "", "--steps=160")
    (record,) = training.incidents()
    assert record["outcome"] == "recovered" and record["steps_seen"] is False
    assert "first_step" not in record["phases"] and record["lost_steps"] is None
    assert 0.1 < record["lost_s"] < 60, record
    line = r"first step not seen\).*; about \d+ \w+ lost \(estimate: newest file written .*0020"
    assert training.says(line), training.out()
    assert training.says(r"^robust-srun: no step of this program is seen, .*progress-regex")
    (roster,) = training.rosters()
    assert roster["estimated"] is True and 0 < roster["ettr"] < 1, roster
    why = " ".join(asked(training, str(training.job), "--why").split())
    assert "first step not seen" in why and "(estimate: newest file written" in why, why
    assert "cost no time" not in why
    assert "ETTR ~" in asked(training, "--accounts") or "~0." in asked(training, "--accounts")


def test_a_script_that_begins_anew_is_warned_of(lab: Lab) -> None:
    training = run(lab, r"--robust-progress-regex='iter.(\d+)'", "--scratch")
    assert training.says(
        r"^robust-srun: warning: the steps began anew at 1 after the restart, although step 25 had"
    )
    assert training.incidents()[0]["lost_steps"] == 25
    resumed = run(lab, r"--robust-progress-regex='iter.(\d+)'")
    assert not resumed.says("warning: the steps began anew"), resumed.out()
    assert resumed.incidents()[0]["lost_steps"] == 5


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
def test_steps_that_torchs_hook_counts(lab: Lab) -> None:
    """The number of lost steps is estimated; an optimizer that begins anew is known."""
    training = run(lab, "", "--torch")
    (record,) = training.incidents()
    assert 1 <= record["lost_steps"] <= 20, record
    assert training.says(r"; about \d+ steps? lost \(estimate: newest file written "), (
        training.out()
    )
    assert not training.says("warning: the optimizer"), training.out()
    (roster,) = training.rosters()
    assert roster["lost_steps"] == record["lost_steps"] and roster["ettr"] is not None
    anew = run(lab, "", "--torch", "--scratch")
    assert anew.says("^robust-srun: warning: the optimizer counts its steps from 1 again")
    assert anew.incidents()[0]["lost_steps"] >= 25, anew.incidents()
