"""Connections of node agents: new ones, lost ones, and those of nodes given up."""

from __future__ import annotations

from made_job import Job

from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Finish, Report, Stop


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


def test_a_lost_node_whose_place_is_filled_stays_lost() -> None:
    job = Job(2, 1)
    job.state.lose_silent(job.node(1), "no word", shared=False)
    job.state.world.places[1] = job.node(2)
    assert any(isinstance(m, Finish) for m in job.join(1, 1).sent)
    assert job.node(1).role is Role.DEAD
