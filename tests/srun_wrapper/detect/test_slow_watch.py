"""The watch for slow jobs: when it looks at the ranks, when it gives up, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from made_job import Job, beat

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.detect import slow_watch
from srun_wrapper.detect.slow_watch import SlowWatch
from srun_wrapper.locate.slow import LOOKS, ROUNDS
from srun_wrapper.protocol.looking_messages import RANK, Look, Machine, ThreadStack
from srun_wrapper.protocol.messages import Counted, Inspect, Inspected, Report, SlotActivity
from srun_wrapper.recover.reports import Reports
from srun_wrapper.recover.slowness import Slowness

REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3)", "<module> (train.py:9)")
WORK = ("forward (model.py:7)", "<module> (train.py:8)")
NODES, SLOW = 3, 3  # rank 3 is on n1
HOT = Machine(hot=("coretemp: 100 °C, limit 100 °C",))


class Ledger:
    dir = None

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.incidents: list[dict[str, Any]] = []
        self.reported: list[tuple[str, str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def incident(self, record: dict[str, Any]) -> None:
        self.incidents.append(record)

    def report_node(self, node: str, incident: str, record: dict[str, Any]) -> None:
        self.reported.append((node, incident, record))


class Watched:
    """Three nodes of two ranks each, whose steps have become twice as slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spares: int = 0, **config: Any) -> None:
        self.job = Job(NODES, spares, slow_after=1.0, **config)
        self.excused = False
        self.said: list[str] = []
        monkeypatch.setattr("srun_wrapper.recover.slowness.say", self.said.append)
        monkeypatch.setattr(SlowWatch, "_waits", lambda *_: [0.0] * (LOOKS * ROUNDS))
        state = self.job.state
        state.step_id = "0"
        self.ledger = Ledger()
        ledger: Any = self.ledger
        self.slowness = Slowness(state, ledger, Reports(state.nodes, ledger, "ada"))
        hears = self.slowness.found, self.slowness.eased
        self.watch = SlowWatch(state, lambda: self.excused, *hears)
        state.pace.steps, state.pace.slowest = 99, 5.0
        state.pace.last = state.pace.epoch_since + 100.0
        self.steps(0.5, 0.5)
        self.steps(1.0, 0.5)
        self.looks = 0
        self.stacks: Callable[[int], Sequence[str]] = lambda r: WORK if r == SLOW else REDUCE
        self.machine: Callable[[int], Machine] = lambda _node: Machine()
        self.mount = ""  # for which the slow rank waits
        self.at: Callable[[int], None] = lambda _look: None

    def steps(self, seconds: float, _each: float = 0.0) -> None:
        for _ in range(20):
            self.job.state.pace.tempo.add(seconds, 1)

    def run(self) -> None:
        """Look until the rounds are over or given up."""

        async def scene() -> None:
            self.watch.look(100.0)
            task = self.watch._task
            answered = 0
            while task is not None and not task.done():
                await asyncio.sleep(0)
                orders = [o for o in self.job.lines[0].sent if isinstance(o, Inspect)]
                if len(orders) > answered:
                    answered = len(orders)
                    self.answer(orders[-1])

        asyncio.run(asyncio.wait_for(scene(), 20.0))

    def answer(self, order: Inspect) -> None:
        self.looks += 1
        self.at(self.looks)
        for node in range(NODES):
            looks = [
                Look(
                    9, RANK, "S", stacks=(ThreadStack("main", tuple(self.stacks(rank))),),
                    mount=self.mount if rank == SLOW else "",
                )
                for rank in (2 * node, 2 * node + 1)
            ]  # fmt: skip
            samples = tuple(
                SlotActivity(n, "S", 0.0, 0, looks=(look,)) for n, look in enumerate(looks)
            )
            self.job.say(node, Inspected(order.token, 0.0, samples, (), self.machine(node)))

    def asked(self) -> list[Inspect]:
        return [order for order in self.job.lines[0].sent if isinstance(order, Inspect)]


def test_the_slow_rank_is_named_and_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    w.run()
    assert w.said == [
        "warning: steps take 1 s, 2.0 times as long as before (0.5 s): rank 3 on n1 is outside "
        "collectives in 100 % of the looks, the others in 0 % (5 of 5 rounds)",
        "  rank 3 is in forward (model.py) < <module> (train.py)",
        "  nothing is done: slow alone does not prove that a machine is at fault",
    ]
    ((name, event),) = w.ledger.events
    assert (name, event["kind"], event["ranks"], event["nodes"]) == ("slow", "ranks", (3,), ("n1",))
    (incident,) = w.ledger.incidents
    assert (incident["suspects"], incident["cause"], incident["action"], incident["outcome"]) == (
        ["n1"], "unknown", "none", "warned",
    )  # fmt: skip
    assert not w.ledger.reported and not w.job.state.failures
    assert len(w.asked()) == LOOKS * ROUNDS
    assert sum(order.machine for order in w.asked()) == 2
    assert all(order.quick and not order.ask for order in w.asked())


def test_a_slow_file_system_of_one_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    w.mount, w.machine = "/data", lambda node: HOT if node == 1 else Machine()
    w.run()
    line = (
        "these ranks wait for file system /data in 100 % of the looks, the ranks of other nodes "
        "in 0 %: it is slow on n1, or they alone use it so much"
    )
    assert w.said[2] == f"  {line}"
    assert w.said[-1].startswith("  nothing is done: look at that file system on n1")
    (incident,) = w.ledger.incidents
    assert (incident["cause"], incident["rule"], incident["suspects"]) == (
        "storage", "slow-storage", ["n1"],
    )  # fmt: skip
    assert line in incident["evidence"]
    assert not w.ledger.reported, "a hot CPU does not explain a slow file system"
    w = Watched(monkeypatch)
    save = ("save (torch/serialization.py:9)", *WORK)
    w.mount, w.stacks = "/data", lambda rank: save if rank == SLOW else REDUCE
    w.run()
    (incident,) = w.ledger.incidents
    assert (incident["cause"], incident["rule"]) == ("unknown", "slow-rank"), "it saves for all"


def test_nobody_is_named_where_all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    w.stacks = lambda _rank: WORK
    w.run()
    assert w.ledger.events[0][1]["kind"] == "all" and not w.ledger.incidents
    assert w.said[-1] == "  nothing is done: no rank and no node is named"


def test_a_hot_machine_is_reported_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch, spares=1)
    w.machine = lambda node: HOT if node == 1 else Machine()
    w.run()
    ((node, number, report),) = w.ledger.reported
    assert (node, report["symptom"], report["rule"]) == ("n1", "slow", "slow-machine")
    assert number == w.ledger.incidents[0]["id"]
    assert "n1: hot: coretemp: 100 °C, limit 100 °C" in report["evidence"]
    assert w.said[-1] == "  n1 is reported to the node gate and stays in the job"
    assert not w.job.state.failures


@pytest.mark.parametrize("node", [0, 2])
def test_a_fault_of_another_machine_is_only_shown_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    w = Watched(monkeypatch)
    w.machine = lambda n: HOT if n == node else Machine()
    w.run()
    assert not w.ledger.reported and w.ledger.incidents[0]["cause"] == "unknown"
    w = Watched(monkeypatch)
    w.stacks = lambda _rank: WORK
    w.machine = lambda n: HOT if n == node else Machine()
    w.run()
    assert f"  n{node}: hot: coretemp: 100 °C, limit 100 °C" in w.said
    assert not w.ledger.reported and not w.ledger.incidents


@pytest.mark.parametrize(("spares", "replaced"), [(1, True), (0, False)])
def test_it_is_replaced_only_on_demand_and_by_a_spare(
    monkeypatch: pytest.MonkeyPatch, spares: int, replaced: bool
) -> None:
    w = Watched(monkeypatch, spares, slow="replace")
    w.machine = lambda node: HOT if node == 1 else Machine()
    w.run()
    assert bool(w.job.state.failures) is replaced
    if not replaced:
        assert "no spare is idle" in w.said[-1] and w.ledger.reported
        return
    found = diagnose(w.job.state.failures, NODES)
    assert (found.symptom, found.cause, found.suspects) == ("slow", "node", ("n1",))
    assert found.rule == "slow-machine" and not w.ledger.reported  # the recovery reports it
    w = Watched(monkeypatch, spares, slow="replace")  # slow alone
    w.run()
    assert not w.job.state.failures and not w.ledger.reported


@pytest.mark.parametrize(
    "why",
    ["ignore", "fast", "phase", "excused", "failure", "ending", "start", "independent", "uneven"],
)
def test_when_it_does_not_look(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    slow = "ignore" if why == "ignore" else "warn"
    w = Watched(monkeypatch, slow=slow, rank_env=why != "independent")
    state = w.job.state
    if why == "fast":
        w.steps(0.5)
    elif why == "phase":
        state.pace.in_phase("eval", 1.0, 1.0)
    elif why == "excused":
        w.excused = True
    elif why == "failure":
        state.lose(w.job.node(2), "gone")
    elif why == "ending":
        w.job.say(1, Report(1, (beat(1, 9, 9, ended=True),)))
    elif why == "start":
        state.pace.steps = 1
    elif why == "uneven":
        state.world.resized = (4, 3)  # rank 0 computes two of the four shares
    w.run()
    assert not w.asked() and not w.said


@pytest.mark.parametrize("why", ["phase", "failure", "epoch", "fast"])
def test_what_comes_between_names_nobody(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    w = Watched(monkeypatch)
    state = w.job.state

    def at(look: int) -> None:
        if look != 20:
            return
        if why == "phase":
            state.pace.in_phase("eval", 1.0, 1.0)
        elif why == "failure":
            state.lose(w.job.node(2), "gone")
        elif why == "epoch":
            state.new_epoch()
        else:
            w.steps(0.5)

    w.at = at
    w.run()
    assert w.asked() and not w.said and not w.ledger.incidents


def test_looks_that_take_longer_than_the_past_name_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most periods are slow ones by then, and the median of all would be the slow step time."""
    w = Watched(monkeypatch)
    w.at = lambda look: w.steps(1.0) if look in (10, 20, 30) else None
    w.run()
    assert w.ledger.incidents


def test_it_does_not_look_while_a_hang_may_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    w.job.state.pace.last -= 1e6
    w.run()
    assert not w.asked()
    assert w.ledger.events[0][1]["kind"] == "unknown"


def test_it_says_it_once_and_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(monkeypatch)
    w.run()
    asked, said = len(w.asked()), len(w.said)
    w.steps(1.0)
    w.run()
    assert (len(w.asked()), len(w.said)) == (asked, said)
    w.steps(0.5)
    w.run()
    assert w.said[said:] == ["steps take 0.5 s again, about as long as before (0.5 s)"]
    assert w.job.state.pace.tempo.usual() == 0.5


@pytest.mark.parametrize(("look", "named"), [(0, False), (1, False), (LOOKS + 1, True)])
def test_errors_of_a_link_count_only_while_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, look: int, named: bool
) -> None:
    """The first look has the counters read: what has grown since the job began is told then."""
    w = Watched(monkeypatch)
    grown = Counted(1, {"mlx5_0 port 1 symbol_error": 500})
    w.at = lambda number: w.job.say(1, grown) if number == look else None
    w.at(0)
    w.run()
    assert bool(w.ledger.reported) is named


def test_a_slip_of_its_own_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(*_: object) -> None:
        raise RuntimeError("boom")

    w = Watched(monkeypatch)
    monkeypatch.setattr(slow_watch, "judge", slip)
    w.run()
    assert not w.said and not w.job.state.failures
