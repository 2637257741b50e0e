"""A rank that makes every step slow is named with its node, and nothing is done to either.

Beside it a job whose ranks all become slow: nobody is named.
"""

from __future__ import annotations

from jobs import Training, start

from lab import Cluster

SLOW = 3
BEFORE, STEPS = 220, 900  # far more than are waited for
WORDS = "--robust-slow-after=1 --robust-interval=0.1"
SOON = 60.0  # s; on a loaded machine most of it is py-spy


def slow(lab: Cluster, rank: int) -> Training:
    """Start a training in which this rank (-1: all) pauses in each step from some step on."""
    steps = ",".join(str(step) for step in range(BEFORE, STEPS))
    pause = f"--fault pause --epoch 0 --rank {rank} --at {steps} --seconds 0.12"
    return start(lab, per_node=2, steps=STEPS, robust=WORDS, toy=pause)


def test_the_slow_rank_is_named_and_of_many_none(lab: Cluster) -> None:
    one, all_ = slow(lab, SLOW), slow(lab, -1)
    for training in (one, all_):
        training.wait_step(BEFORE)
    for training in (one, all_):
        training.until(lambda t=training: t.events("slow"), "a look at the ranks", SOON)
    (named,), (none,) = one.events("slow"), all_.events("slow")
    node = one.runs()[0][1]
    assert (named["kind"], named["ranks"], named["nodes"]) == ("ranks", [SLOW], [node])
    assert named["lines"][0].startswith(f"rank {SLOW} is in fault (toy.py)"), named
    assert (none["kind"], none["ranks"], none["nodes"]) == ("all", [], []), none
    (incident,) = one.incidents()
    assert incident["suspects"] == [node] and incident["outcome"] == "warned"
    assert not all_.incidents()
    for training in (one, all_):
        assert not training.accusations() and len(training.events("epoch")) == 1
        lab.exec("head", ["scancel", str(training.job)], check=True)
        training.check_gone()
