"""Connections of node agents: new ones, lost ones, those of nodes given up, and strangers."""

from __future__ import annotations

from typing import cast

import pytest
from made_job import Job, Line, as_connection, hello

from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Ack, Finish, Message, Report, Start, Started, Stop


def test_a_lost_node_that_comes_back_is_ended() -> None:
    """Cut off, given up, healed: its ranks of an old epoch must not go on."""
    job = Job()
    job.state.lose(job.node(1), "no word")
    line = job.join(1, epoch=1)
    assert job.node(1).role is Role.DEAD
    assert Finish(((0, 0), (0, 0))) in line.sent


def start(epoch: int) -> Start:
    return Start(epoch, {}, (), 1.0, 0, True, 2, "n0", 7001)


@pytest.mark.parametrize(
    ("order", "epoch", "stopped", "again"),
    [
        (start(1), 0, 0, True),  # it went under with the connection
        (start(1), 1, 0, False),
        (start(2), 1, 1, True),
        (Stop(1, 1.0), 1, 0, True),
        (Stop(1, 1.0), 1, 1, False),
        (Finish(((0, 0),)), 1, 1, True),
        (None, 0, 0, False),
    ],
)
def test_orders_survive_a_lost_connection(
    order: Message | None, epoch: int, stopped: int, again: bool
) -> None:
    job = Job()
    node = job.node(0)
    node.order, node.stopped = order, stopped
    job.inbox.closed(as_connection(job.lines[0]))
    line = job.join(0, epoch)
    assert line.sent == [Ack(0, 0.25), *([order] if order is not None and again else [])]


def test_a_new_connection_replaces_the_old() -> None:
    job = Job()
    job.say(0, Started(5, 1, 0, 1))
    old, new = job.lines[0], job.join(0, epoch=1)
    assert old.closed and new.sent[0] == Ack(5, 0.25)
    job.inbox.closed(as_connection(old))
    assert cast(object, job.node(0).connection) is new
    job.inbox.closed(as_connection(new))
    assert job.node(0).connection is None and job.node(0).closed_at is not None


def test_strangers_are_cut_off() -> None:
    job, line = Job(), Line()
    job.inbox.message(as_connection(line), Report(1, ()))
    assert line.closed and line.sent == []
    job.inbox.closed(as_connection(line))


def test_a_standby_node_that_comes_too_late_is_sent_away() -> None:
    job = Job()
    line = Line()
    job.inbox.message(as_connection(line), hello(9, standby_request=7))
    assert isinstance(line.sent[-1], Finish)
    assert not any(n.standby_request for n in job.state.live())


def test_a_node_that_was_given_up_for_its_silence_is_taken_back() -> None:
    job, back = Job(3, 1), list[str]()
    job.state.on_back = lambda node: back.append(node.name)
    for index in (1, 2, 3):
        job.state.lose_silent(job.node(index), "no word", shared=False)
    assert job.state.vacant() == ("n1", "n2") and len(job.state.failures) == 2
    job.state.members.stop_epoch()  # the recovery has begun: the ranks of the others are stopped
    job.say(1, Report(1, ()))  # its kernel still had that to send: only a new connection counts
    assert job.lines[1].closed and job.node(1).role is Role.DEAD
    lines = [job.join(index, 1) for index in (1, 2, 3)]
    assert back == ["n1", "n2", "n3"] and not job.state.failures and not job.state.vacant()
    assert [job.node(i).role for i in (1, 2, 3)] == [Role.ACTIVE, Role.ACTIVE, Role.SPARE]
    for line in lines[:2]:
        assert any(isinstance(m, Stop) and m.epoch == 1 for m in line.sent)
        assert not any(isinstance(m, Finish) for m in line.sent)


def test_a_spare_that_is_silent_before_its_first_epoch_is_taken_back() -> None:
    """The spare has a place, but none in the failed epoch: it was told to end, and reported."""
    job = Job(2, 1)
    job.state.lose(job.node(1), "it is gone")
    job.state.members.take_place(1, job.node(2))
    job.state.lose_silent(job.node(2), "no word", shared=False)
    assert job.state.vacant() == ("n2",)
    assert not any(isinstance(m, Finish) for m in job.join(2, 1).sent)
    assert job.node(2).role is Role.ACTIVE and not job.state.vacant()


def test_a_lost_node_whose_place_is_filled_stays_lost() -> None:
    job = Job(2, 1)
    job.state.lose_silent(job.node(1), "no word", shared=False)
    job.state.world.places[1] = job.node(2)
    assert any(isinstance(m, Finish) for m in job.join(1, 1).sent)
    assert job.node(1).role is Role.DEAD
