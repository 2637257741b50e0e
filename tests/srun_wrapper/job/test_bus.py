"""Messages to the node agents, and the replies to a request."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from made_job import Job

import srun_wrapper
from srun_wrapper.protocol.checkpoint_messages import Fetch, Moved, Stock, TakeStock
from srun_wrapper.protocol.messages import Signal, Start, Stop


def test_a_standing_order_that_a_node_did_not_obey_is_sent_again_on_its_next_connection() -> None:
    job = Job()
    node = job.node(0)
    job.state.bus.send(node, Stop(1, 5.0))
    job.state.bus.send(node, Signal(10))
    assert [Stop(1, 5.0), Signal(10)] == job.lines[0].sent[-2:]
    assert Stop(1, 5.0) in job.join(0).sent
    node.stopped = 1
    assert Stop(1, 5.0) not in job.join(0).sent


def test_an_order_that_is_sent_once_leaves_the_standing_order_alone() -> None:
    job = Job()
    node = job.node(0)
    job.state.bus.send(node, Stop(1, 5.0))
    job.state.bus.send_once(node, Stop(2, 0.0))
    assert node.order == Stop(1, 5.0)


def test_a_message_to_all_goes_to_the_nodes_in_the_job() -> None:
    job = Job()
    job.state.lose(job.node(1), "gone")
    job.state.bus.broadcast(Signal(10))
    assert [Signal(10) in line.sent for line in job.lines] == [True, False, True]


def test_a_request_collects_its_replies_by_token_and_class() -> None:
    job = Job()
    bus, nodes = job.state.bus, [job.node(0), job.node(1)]
    wanted = {(node.key, local) for node in nodes for local in range(2)}

    async def ask() -> tuple[bool, list[tuple[str, int]]]:
        with bus.ask(Stock, lambda token: [(node, TakeStock(token)) for node in nodes]) as first:
            with bus.ask(Stock, lambda _token: ()) as second:
                job.say(0, Stock(first.token, 1, ()))
            job.say(0, Stock(second.token, 0, ()))  # closed
            job.say(0, Moved(first.token, 0, ()))  # not what was asked for
            late = await first.until(lambda: first.answered(wanted), 0.01)
            for line, local in ((0, 0), (1, 0), (1, 1)):
                asyncio.get_running_loop().call_soon(job.say, line, Stock(first.token, local, ()))
            assert not late and await first.until(lambda: first.answered(wanted), 60.0)
        return second.replies == [], [(node.name, reply.local) for node, reply in first.replies]

    nothing, replies = asyncio.run(ask())
    assert nothing and replies == [("n0", 1), ("n0", 0), ("n1", 0), ("n1", 1)]
    assert all(isinstance(job.lines[i].sent[-1], TakeStock) for i in range(2))


def test_a_start_is_a_standing_order_until_the_node_reports_its_epoch() -> None:
    job = Job()
    node = job.node(0)
    order = Start(epoch=3, env={}, ranks=(), grace=0.0, index=0, first=True, nodes=2,
                  master="", port=0, peers=())  # fmt: skip
    job.state.bus.send(node, order)
    assert order in job.join(0).sent
    assert order not in job.join(0, epoch=3).sent


def test_an_open_request_is_sent_again_on_a_new_connection_until_it_is_answered() -> None:
    """A connection that broke meanwhile may have taken the order with it, or the reply."""
    job = Job()
    bus, node = job.state.bus, job.node(0)
    with bus.ask(Moved, lambda token: [(node, Fetch(token, local, ())) for local in (0, 1)]) as ask:
        job.say(0, Moved(ask.token, 0, ()))
        assert [m for m in job.join(0).sent if isinstance(m, Fetch)] == [Fetch(ask.token, 1, ())]
        for _ in range(2):  # the answer that was lost, and the one to the order that came twice
            bus.deliver(node, Moved(ask.token, 1, ()))
        assert len(ask.replies) == 2
        assert not [m for m in job.join(0).sent if isinstance(m, Fetch)]
    assert not [m for m in job.join(0).sent if isinstance(m, Fetch)]


def test_nobody_else_sends_on_a_connection() -> None:
    """An order sent past the bus is lost with its connection: it is not kept and not resent."""
    room = Path(srun_wrapper.__file__).parent
    senders = {
        str(path.relative_to(room))
        for path in room.rglob("*.py")
        if re.search(r"\bconnection\.send\(", path.read_text(encoding="utf-8"))
    }
    assert senders == {"job/bus.py"}
