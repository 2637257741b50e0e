"""The infiniband family: InfiniBand and RoCE ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from fake_host import healthy, ids, port
from fake_system import FakeSystem
from hypothesis import given
from hypothesis import strategies as st

from health.checks.network import infiniband
from health.node import ibports

run = infiniband.CHECK.run
FAIL, WARN = "FAIL", "WARN"
EXPECTED = ["mlx5_[0-7]:400"]
FLEET = {"infiniband": {f"mlx5_{n}": {"rate": 400} for n in range(8)}}
by_site_or_record = pytest.mark.parametrize(
    "source", [{"options": {"infiniband": {"expected": EXPECTED}}}, {"fleet": FLEET}]
)
BASE = "/sys/class/infiniband"


def node(*changed: Mapping[str, str], **more: Any) -> FakeSystem:
    """The healthy node's eight ports, some of them changed or added."""
    files: dict[str, str] = {}
    for one in changed:
        files |= one
    return healthy(more=files, **more)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400 Gb/sec (4X NDR)", (400.0, 4)),
        ("200 Gb/sec (2X NDR)", (200.0, 2)),
        ("2.5 Gb/sec (1X SDR)", (2.5, 1)),
        ("100 Gb/sec", (100.0, 0)),
        ("", (0.0, 0)),
        ("<unknown>", (0.0, 0)),
    ],
)
def test_parse_rate(text: str, rate: tuple[float, int]) -> None:
    assert ibports.parse_rate(text) == rate


@given(st.text(max_size=40))
def test_any_text_is_a_rate_and_a_state(text: str) -> None:
    rate, width = ibports.parse_rate(text)
    assert rate >= 0
    assert width >= 0
    ibports.parse_state(text)


def test_ports_of_a_node() -> None:
    second = {
        path.replace("/ports/1/", "/ports/2/"): value
        for path, value in port("mlx5_8", "1: DOWN").items()
    }
    found = ibports.ports(node(port("mlx5_10"), port("mlx5_8"), second))
    names = [*(f"mlx5_{n}" for n in range(9)), "mlx5_8/2", "mlx5_10"]
    assert [one.name for one in found] == names
    assert [one.active for one in found].count(False) == 1
    assert found[0].rate == 400.0
    assert found[0].firmware == "28.39.1002"


def test_what_cannot_be_read_is_missing() -> None:
    files = {f"{BASE}/rdmap0s6/ports/1/state": "4: ACTIVE\n"}  # an adapter with its own counters
    system = FakeSystem(files)
    [one] = ibports.ports(system)
    assert one.active
    assert one.counters == {}
    assert run(system) == []


@pytest.mark.parametrize(
    ("entries", "ports"),
    [
        (["mlx5_[0-1]:400", "mlx5_4/2"], {"mlx5_0": 400.0, "mlx5_1": 400.0, "mlx5_4/2": 0.0}),
        (["mlx5_3/1"], {"mlx5_3": 0.0}),
        ([], {}),
    ],
)
def test_parse_expected(entries: list[str], ports: dict[str, float]) -> None:
    wanted = infiniband.parse_expected(entries)
    assert {name: want.rate for name, want in wanted.items()} == ports


@pytest.mark.parametrize("entry", ["mlx5_0:fast", "mlx5_[0-", "mlx5_[a-b]"])
def test_an_entry_that_cannot_be_used(entry: str) -> None:
    found = ids(run(node(options={"infiniband": {"expected": [entry]}})))
    assert found == [(WARN, "ib-setting", "")]


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(json)
def test_any_record_of_the_fleet_can_be_read(record: Any) -> None:
    infiniband.from_fleet(record)


# --- a port that is down ------------------------------------------------------------------------

DOWN = port("mlx5_3", "1: DOWN")
WAS_UP = port("mlx5_3", "1: DOWN", port_rcv_packets="42\n")
LOST_LINK = port("mlx5_3", "1: DOWN", link_downed="1\n")
INIT = port("mlx5_3", "2: INIT", physical="5: LinkUp")
DISABLED = port("mlx5_3", "1: DOWN", physical="3: Disabled", port_rcv_packets="42\n")


@by_site_or_record
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (DOWN, (FAIL, "ib-down", "mlx5_3")),
        (WAS_UP, (FAIL, "ib-down", "mlx5_3")),
        (DISABLED, (FAIL, "ib-down", "mlx5_3")),
        (INIT, (FAIL, "ib-not-active", "mlx5_3")),
        (port("mlx5_3", rate="200 Gb/sec (4X HDR)"), (FAIL, "ib-rate", "mlx5_3")),
    ],
)
def test_a_wanted_port(
    source: Any, changed: Mapping[str, str], found: tuple[str, str, str]
) -> None:
    assert ids(run(node(changed, **source))) == [found]


@by_site_or_record
def test_a_wanted_port_that_is_not_there(source: Any) -> None:
    gone = tuple(path for path in port("mlx5_3"))
    [finding] = run(healthy(without=gone, **source))
    assert (finding.status, finding.check, finding.device) == (FAIL, "ib-missing", "mlx5_3")
    assert finding.action == "reboot"


@by_site_or_record
def test_ports_that_nobody_wants_are_left_alone(source: Any) -> None:
    spare = port("mlx5_8", "1: DOWN", port_rcv_packets="42\n")
    assert run(node(spare, **source)) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (DOWN, [(WARN, "ib-down-unexpected", "mlx5_3")]),  # seven of eight are up
        (WAS_UP, [(FAIL, "ib-down", "mlx5_3")]),
        (LOST_LINK, [(FAIL, "ib-down", "mlx5_3")]),
        (DISABLED, []),
        (INIT, [(WARN, "ib-not-active", "mlx5_3")]),
    ],
)
def test_a_port_of_which_nobody_said_anything(changed: Any, found: list[Any]) -> None:
    assert ids(run(node(changed))) == found


def test_a_port_without_a_cable_is_down_on_the_whole_fleet() -> None:
    """Two cards with two ports, the second of each not connected; and another board's, likewise."""
    unused = [port(f"mlx5_{n}", "1: DOWN", board="MT_0000000359") for n in (9, 11)]
    used = [port(f"mlx5_{n}", board="MT_0000000359") for n in (8, 10)]
    assert run(node(*unused, *used)) == []


def test_a_roce_port_is_not_of_the_kind_of_infiniband_ones() -> None:
    assert run(node(port("mlx5_8", "1: DOWN", link="Ethernet"))) == []


def test_no_port_up_at_all_is_said() -> None:
    down = [port(f"mlx5_{n}", "1: DOWN") for n in range(8)]
    assert ids(run(node(*down))) == [(WARN, "ib-down-unexpected", "")]
    off = [port(f"mlx5_{n}", "1: DOWN", physical="3: Disabled") for n in range(8)]
    assert run(node(*off)) == []


# --- rate, firmware, counters -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        (port("mlx5_3", rate="200 Gb/sec (4X HDR)"), [WARN]),  # perhaps a storage network
        (port("mlx5_3", rate="100 Gb/sec (1X NDR)"), [FAIL]),  # three lanes lost
        (port("mlx5_3", rate="25 Gb/sec (1X EDR)", link="Ethernet"), []),  # 25GbE is one lane
        (port("mlx5_3", rate="800 Gb/sec (4X XDR)"), []),
        (port("mlx5_3", rate="100 Gb/sec (4X EDR)", board="MT_0000000359"), []),
        (port("mlx5_3", rate=""), []),
    ],
)
def test_rate_beside_its_like(changed: Any, status: list[str]) -> None:
    found = run(node(changed))
    assert [finding.status for finding in found] == status
    assert all(finding.check == "ib-rate" for finding in found)


def test_a_site_may_want_less_than_its_like_have() -> None:
    options = {"infiniband": {"expected": ["mlx5_[0-2,4-7]:400", "mlx5_3:200"]}}
    assert run(node(port("mlx5_3", rate="200 Gb/sec (2X NDR)"), options=options)) == []


@pytest.mark.parametrize(
    ("firmware", "fleet", "found"),
    [
        ("28.39.1002", ["28.39.1002"], []),
        ("28.37.1014", ["28.39.1002"], [(WARN, "ib-firmware", "mlx5_3")]),
        ("28.37.1014", ["28.37.1014", "28.39.1002"], []),
        ("28.37.1014", None, [(WARN, "ib-firmware", "mlx5_3")]),  # others of its board differ
        ("28.39.1002", None, []),
    ],
)
def test_firmware(firmware: str, fleet: list[str] | None, found: list[Any]) -> None:
    record = {f"mlx5_{n}": {"firmware": fleet or ["28.39.1002"]} for n in range(8)}
    system = node(port("mlx5_3", firmware=firmware), fleet={"infiniband": record} if fleet else {})
    assert ids(run(system)) == found


def test_the_record_adds_what_the_setting_does_not_say() -> None:
    record = {"mlx5_3": {"rate": 400, "firmware": ["28.39.1002"]}, "mlx5_9": {"rate": 400}}
    system = node(
        port("mlx5_3", rate="200 Gb/sec (4X HDR)", firmware="28.37.1014"),
        options={"infiniband": {"expected": ["mlx5_3"]}},
        fleet={"infiniband": record},
    )
    assert ids(run(system)) == [(FAIL, "ib-rate", "mlx5_3"), (WARN, "ib-firmware", "mlx5_3")]


@pytest.mark.parametrize(
    ("counters", "hours", "found"),
    [
        ({"symbol_error": "2000"}, 24, []),  # 83 an hour
        ({"symbol_error": "2000"}, 10, [(WARN, "ib-errors", "mlx5_3")]),
        ({"symbol_error": "100"}, 0.5, []),  # within the first hour: 100 an hour
        ({"link_error_recovery": "300"}, 24, [(WARN, "ib-errors", "mlx5_3")]),
        ({"port_rcv_errors": "10"}, 0.5, []),
        ({"port_rcv_errors": "11"}, 0.5, [(WARN, "ib-errors", "mlx5_3")]),
        ({"local_link_integrity_errors": "300"}, 24, [(WARN, "ib-errors", "mlx5_3")]),
        ({"excessive_buffer_overrun_errors": "300"}, 24, [(WARN, "ib-errors", "mlx5_3")]),
        ({"link_downed": "3"}, 24, []),  # reboots of switches
        ({"link_downed": "9"}, 24, [(WARN, "ib-flaps", "mlx5_3")]),
        ({"link_downed": "9"}, 240, []),
        ({"local_ack_timeout_err": "3000"}, 24, []),
        ({"local_ack_timeout_err": "100000"}, 24, [(WARN, "ib-retransmits", "mlx5_3")]),
        ({"symbol_error": "nonsense"}, 24, []),
    ],
)
def test_counters(counters: dict[str, str], hours: float, found: list[Any]) -> None:
    system = node(port("mlx5_3", **counters), uptime=3600.0 * hours)
    assert ids(run(system)) == found


def test_counters_that_are_not_judged_are_not_read() -> None:
    """Each costs a command to the adapter."""
    system = node(DOWN)
    run(system)
    read = [asked for asked in system.asked if "mlx5_3/ports/1/" in asked and "counters/" in asked]
    assert sorted(asked.rsplit("/", 1)[1] for asked in read) == ["link_downed", "port_rcv_packets"]
