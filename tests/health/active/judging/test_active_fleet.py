"""Baselines of the fleet's recorded results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.active.judging import fleet
from health.active.judging.fleet import NO_BASELINES, FleetSpread, baselines, event_data
from health.active_tests import Measured
from health.history import events as history
from health.node import rootfiles
from health.node.system import Event

KEY = ("m", "gemm", "bf16_tflops")


def event(
    node: str, value: float, time: float = 1.0, device: str = "gpu0", **more: object
) -> Event:
    one = Measured("gemm", node, device, "m", {"bf16_tflops": value}, {"k": "d1"})
    return Event(time, fleet.KIND, "boot", event_data(one, "quick") | more)


def test_an_event_is_what_was_measured() -> None:
    one = Measured(
        "pair", "n1", "", "m", {"busbw_gbps": 3.5, "bad": float("nan")}, peers=("n1", "n2")
    )
    assert event_data(one, "standard") == {
        "node": "n1", "level": "standard", "test": "pair", "device": "", "model": "m",
        "values": {"busbw_gbps": 3.5}, "digests": {}, "ok": True, "peers": ["n1", "n2"],
    }  # fmt: skip
    bad = event_data(one._replace(wrong=("w",), error="e"), "long")
    assert (bad["ok"], bad["wrong"], bad["error"]) == (False, ["w"], "e")
    assert event_data(one, "quick", named=True)["ok"] is False


def test_the_largest_event_is_one_line_of_the_ledger() -> None:
    name = "ü" * 400
    most = Measured(
        name, name, name, name,
        {f"{i}" + "x" * 190: 1 / 3 for i in range(500)} | {name: 1.0},
        {f"{i}" + "x" * 190: "f" * 128 for i in range(500)} | {name: name},
        (name,) * 500, name, peers=(name,) * 500,
    )  # fmt: skip
    raw = history.line(Event(1.0, fleet.KIND, "b", event_data(most, "long")))
    assert len(raw) <= rootfiles.LINE_LIMIT
    assert b'"cut"' not in raw


@pytest.mark.parametrize(
    ("spread", "limit"),
    [
        (FleetSpread(100, 8), 60),
        (FleetSpread(100, 7), None),  # too few nodes
        (FleetSpread(0, 8), None),
    ],
)
def test_what_is_slow_in_the_fleet(spread: FleetSpread, limit: float | None) -> None:
    assert fleet.limit(spread) == pytest.approx(limit)


def test_a_much_tested_node_weighs_no_more_than_another() -> None:
    often = [event("busy", 10.0, time=i) for i in range(500)]
    once = [event(f"n{i}", 100.0) for i in range(8)]
    made = baselines(often + once).spreads[KEY]
    assert (made.p50, made.nodes) == (100, 9)


def test_only_the_newest_results_of_a_device_count() -> None:
    old = [event("n1", 10.0, time=i) for i in range(50)]
    new = [event("n1", 90.0, time=100.0 + i) for i in range(fleet.NEWEST)]
    assert baselines(new + old).spreads[KEY].p50 == 90


@pytest.mark.parametrize(
    "broken",
    [
        Event(1.0, "xid", "b", event("n1", 1.0).data),
        event("n1", 1.0, ok=False),
        event("n1", 1.0, ok="yes"),
        event("n1", 1.0, values=[1], digests=7),
        event("n1", 1.0, values={"bf16_tflops": "fast"}, digests={"k": 3}),
        event("n1", 1.0, values={"bf16_tflops": True}, digests={"k": ""}),
        event("n1", 1.0, values={"bf16_tflops": float("inf")}, digests={}),
    ],
)
def test_what_did_not_pass_or_is_no_result_does_not_count(broken: Event) -> None:
    assert baselines([broken]) == NO_BASELINES


@pytest.mark.parametrize(
    ("said", "agreed"),
    [
        ({"n1": "d", "n2": "d", "n3": "d"}, {"k": "d"}),
        ({"n1": "d", "n2": "d"}, {}),
        ({"n1": "d", "n2": "d", "n3": "d", "n4": "e"}, {}),
        ({**{f"n{i}": "d" for i in range(9)}, "n9": "e"}, {"k": "d"}),
        ({**{f"n{i}": "d" for i in range(8)}, "n8": "e"}, {}),
    ],
)
def test_a_digest_is_the_fleets_if_three_nodes_and_nine_tenths_agree(
    said: dict[str, str], agreed: dict[str, str]
) -> None:
    events = [event(node, 1.0, digests={"k": digest}) for node, digest in said.items()]
    assert baselines(events).digests == agreed
    older = [event(node, 1.0, time=0.5, digests={"k": "old"}) for node in said]
    assert baselines(older + events).digests == agreed


def test_devices_of_one_node_are_no_agreement() -> None:
    assert not baselines(event("n1", 1.0, device=f"gpu{i}") for i in range(8)).digests


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(1, 1000), st.integers(0, 9))), st.data())
def test_the_order_of_events_does_not_matter(
    made: list[tuple[int, float, int]], data: st.DataObject
) -> None:
    events = [event(f"n{node}", value, time) for node, value, time in dict.fromkeys(made)]
    once = {(e.data["node"], e.time): e for e in events}  # the same moment decides nothing
    shuffled = data.draw(st.permutations(list(once.values())))
    assert baselines(shuffled) == baselines(once.values())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "nodes").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    return tmp_path


def write(state: Path, node: str, events: list[Event], extra: bytes = b"") -> None:
    path = state / "nodes" / f"{node}.jsonl"
    path.write_bytes(b"".join(history.line(each) for each in events) + extra)
    path.chmod(0o644)


def test_the_ledger_of_all_nodes_is_read(state: Path) -> None:
    for index in range(9):
        node = f"n{index}"
        boot = Event(0.5, "boot", "b", {})
        write(state, node, [boot, event(node, 100.0 + index)], b'{"kind":"active","tim')
    made = baselines(fleet.recorded(str(state)))
    assert (made.spreads[KEY].p50, made.digests) == (104, {"k": "d1"})


def test_what_is_no_record_of_roots_is_left_out(state: Path) -> None:
    write(state, "n1", [event("n1", 1.0)])
    write(state, "n2", [event("other", 2.0)])  # told of another node
    write(state, "drains", [event("drains", 3.0)])
    write(state, "n3", [event("n3", 4.0)])
    (state / "nodes" / "n3.jsonl").chmod(0o666)
    os.mkfifo(state / "nodes" / "n4.jsonl")
    (state / "nodes" / "n5.jsonl").symlink_to(state / "nodes" / "n1.jsonl")
    assert [each.data["node"] for each in fleet.recorded(str(state))] == ["n1"]


def test_only_the_newest_end_of_a_long_file_is_read(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_TAIL", fleet._LEAST)
    write(state, "n1", [event("n1", float(i), time=i) for i in range(1000)])
    read = fleet.recorded(str(state))
    assert 10 < len(read) < 100 and read[-1].time == 999


def test_a_very_large_fleet_is_sampled_over_all_names(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_MOST_NODES", 10)
    for index in range(25):
        write(state, f"n{index:02}", [event(f"n{index:02}", 1.0)])
    nodes = [each.data["node"] for each in fleet.recorded(str(state))]
    assert nodes == [f"n{index:02}" for index in range(0, 25, 3)]


def test_before_there_is_any_record(tmp_path: Path) -> None:
    assert fleet.recorded(str(tmp_path / "none")) == []
