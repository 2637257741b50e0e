"""The ethernet family."""

from __future__ import annotations

from typing import Any

import pytest
from fake_host import ROUTE, healthy, ids, interface
from hypothesis import given
from hypothesis import strategies as st

from health.checks.network import ethernet

run = ethernet.CHECK.run
FAIL, WARN = "FAIL", "WARN"
NET = "/sys/class/net"


@pytest.mark.parametrize(
    ("entry", "parsed"), [("eth0", ("eth0", 0)), ("bond0.100:25000", ("bond0.100", 25000))]
)
def test_parse_expected(entry: str, parsed: tuple[str, int]) -> None:
    assert ethernet.parse_expected(entry) == parsed


@pytest.mark.parametrize("entry", ["", ":1000", "eth0:", "eth0:fast", "../x", "eth0:-1"])
def test_an_entry_that_cannot_be_used(entry: str) -> None:
    options = {"ethernet": {"expected": [entry]}}
    assert (WARN, "ethernet-setting", "") in ids(run(healthy(options=options)))


V6 = (
    "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
    "fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth1\n"
    "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
    "00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n"
)


@pytest.mark.parametrize(
    ("route", "route6", "names"),
    [
        (ROUTE, "", ["bond0"]),
        (ROUTE, V6, ["bond0"]),
        ("Iface\n", V6, ["eth1"]),
        ("", "", []),
        (ROUTE.replace("\t0003\t", "\t0200\t"), "", []),  # "unreachable default"
    ],
)
def test_default_interfaces(route: str, route6: str, names: list[str]) -> None:
    assert ethernet.default_interfaces(route, route6) == names


@pytest.mark.parametrize(
    ("carrier", "operstate", "link"),
    [
        ("1", "up", True),
        ("1", "unknown", True),
        ("0", "down", False),
        ("0", "unknown", False),
        ("", "down", False),  # administratively down: carrier cannot be read
        ("", "unknown", True),
        ("", "", True),
    ],
)
def test_has_link(carrier: str, operstate: str, link: bool) -> None:
    assert ethernet.has_link(carrier, operstate) == link


TWO = ROUTE + "eth2\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\t0\t0\t0\n"


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({f"{NET}/bond0/carrier": "0\n"}, [(FAIL, "ethernet-down", "bond0")]),
        ({"/proc/net/route": TWO}, [(WARN, "ethernet-down", "eth2")]),
        (
            {"/proc/net/route": TWO, f"{NET}/bond0/carrier": "0\n"},
            [(FAIL, "ethernet-down", "bond0"), (FAIL, "ethernet-down", "eth2")],
        ),
        ({f"{NET}/eth1/carrier": "0\n"}, [(WARN, "bond-degraded", "bond0")]),
        ({f"{NET}/bond0/duplex": "half\n"}, [(WARN, "ethernet-half-duplex", "bond0")]),
        (
            {f"{NET}/eth0/statistics/rx_crc_errors": "5000\n"},
            [(WARN, "ethernet-errors", "eth0")],
        ),
        ({f"{NET}/eth0/statistics/rx_crc_errors": "500\n"}, []),  # 5e-7 of the frames
        ({f"{NET}/eth0/carrier_down_count": "40\n"}, [(WARN, "ethernet-flaps", "eth0")]),
        ({f"{NET}/eth0/carrier_down_count": "4\n"}, []),
        ({f"{NET}/bond0/speed": "-1\n"}, []),
        ({"/proc/net/route": ""}, []),  # a network namespace without a way out
    ],
)
def test_the_default_route(more: dict[str, str], found: list[Any]) -> None:
    assert ids(run(healthy(more=more))) == found


@pytest.mark.parametrize(
    ("expected", "fleet", "found"),
    [
        (["bond0:200000"], {}, []),
        (["bond0:400000"], {}, [(FAIL, "ethernet-slow", "bond0")]),
        (["eth2"], {}, [(FAIL, "ethernet-down", "eth2")]),
        (["eth7"], {}, [(FAIL, "ethernet-missing", "eth7")]),
        ([], {"ethernet": {"eth0": 200000}}, [(FAIL, "ethernet-slow", "eth0")]),
        (["eth0"], {"ethernet": {"eth0": 200000}}, [(FAIL, "ethernet-slow", "eth0")]),
        (["eth0:100000"], {"ethernet": {"eth0": 200000}}, []),  # the setting wins
        ([], {"ethernet": "eth0"}, []),
        ([], {"ethernet": {"eth0": "fast"}}, []),
    ],
)
def test_expected(expected: list[str], fleet: dict[str, Any], found: list[Any]) -> None:
    options = {"ethernet": {"expected": expected}}
    assert ids(run(healthy(options=options, fleet=fleet))) == found


def test_a_speed_that_cannot_be_read_is_no_finding() -> None:
    more = interface("eth9")
    more[f"{NET}/eth9/speed"] = ""
    options = {"ethernet": {"expected": ["eth9:100000"]}}
    assert run(healthy(more=more, options=options)) == []


@given(st.integers(0, 10**9), st.integers(0, 10**12), st.floats(1, 10**8))
def test_counters_never_make_a_fail(crc: int, packets: int, uptime: float) -> None:
    values = {"crc": crc, "packets": packets, "downs": crc}
    assert all(f.status == WARN for f in ethernet.judge_counters("eth0", values, uptime))
