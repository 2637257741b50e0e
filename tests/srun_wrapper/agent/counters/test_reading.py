"""A node's error counters: what is read of /sys, and when it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import until

from robust_slurm.error_counters import LARGEST
from srun_wrapper.agent.counters import read as reading
from srun_wrapper.agent.counters.watch import MOST, Counters, grown
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.looking_messages import Machine

PORT = "class/infiniband/mlx5_0/ports/1"
NIC = "class/net/eth0"
PCI = "bus/pci/devices/0000:3b:00.0"
TREE = {
    f"{PORT}/counters/symbol_error": "7\n",
    f"{PORT}/counters/port_rcv_data": "99\n",  # no error
    f"{PORT}/counters/port_rcv_errors": f"{1 << 63}\n",
    f"{PORT}/counters/link_error_recovery": "-3\n",
    f"{PORT}/counters/local_link_integrity_errors": "1_0\n",
    f"{PORT}/counters/excessive_buffer_overrun_errors": "\u0663\n",
    f"{PORT}/hw_counters/local_ack_timeout_err": f"{(1 << 63) - 1}\n",
    f"{PORT}/hw_counters/out_of_sequence": "3\n",  # also in normal work
    f"{PORT}/counters/link_downed": "not a number\n",
    f"{NIC}/statistics/rx_crc_errors": "5\n",
    f"{NIC}/statistics/rx_dropped": "800\n",  # also what nobody listens to
    f"{NIC}/statistics/rx_missed_errors": "3\n",
    f"{NIC}/carrier_down_count": "1\n",
    "class/net/lo/statistics/rx_errors": "1\n",
    "class/net/veth1/statistics/rx_errors": "1\n",
    "devices/system/edac/mc/mc0/ce_count": "2\n",
    f"{PCI}/aer_dev_correctable": "RxErr 4\nTOTAL_ERR_COR 4\n",
    f"{PCI}/aer_dev_fatal": "\n",  # without a total
    f"{PCI}/aer_dev_nonfatal": "UnsupReq 6\nTOTAL_ERR_NONFATAL 6\n",
}


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / PCI / "infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / NIC / "device").symlink_to(tmp_path / PCI)
    return tmp_path


def test_the_errors_of_all_devices_are_read_and_nothing_else(sys: Path) -> None:
    assert reading.read(sys) == {
        "mlx5_0 port 1 symbol_error": 7,
        "mlx5_0 port 1 local_ack_timeout_err": (1 << 63) - 1,
        "eth0 rx_crc_errors": 5,
        "eth0 carrier_down_count": 1,
        "memory mc0 corrected ECC errors": 2,
        "PCIe 0000:3b:00.0 (mlx5_0) correctable errors": 4,
        "PCIe 0000:3b:00.0 (mlx5_0) nonfatal errors": 0,
    }


def test_a_node_without_such_hardware_has_no_counters(tmp_path: Path) -> None:
    assert reading.read(tmp_path) == {}


def test_reading_ends_when_its_time_is_over_also_among_entries_that_are_skipped(
    sys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reading.read(sys, seconds=-1.0) == {}
    for n in range(100):
        (sys / f"class/net/veth{n}/statistics").mkdir(parents=True, exist_ok=True)
    asked: list[Path] = []
    clock = [0.0]

    def skipped(path: Path) -> bool:
        asked.append(path)
        clock[0] += 1.0
        return False

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Path, "is_symlink", skipped)
    found = reading.read(sys, seconds=10.0)
    assert len(asked) == 11
    assert "memory mc0 corrected ECC errors" in found  # the others come before


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (({"a": 1}, {"a": 4}), {"a": 3}),
        (({"a": 1}, {"a": 1}), {}),
        (({"a": 9}, {"a": 2}), {}),  # set to zero in between
        (({"a": 9}, {"a": 2}, {"a": 5}), {"a": 3}),  # which hides nothing
        (({"a": 1}, {"a": 9}, {"a": 2}), {"a": 8}),
        (({"a": 1}, {}), {}),
        (({}, {"a": 5}), {}),  # may be older than robust-task
        (({"a": 0, "b": 2}, {"a": 1, "b": 2}), {"a": 1}),
        (({"a": 0}, {"a": LARGEST}, {"a": 0}, {"a": LARGEST}), {"a": LARGEST}),
    ],
)
def test_what_was_read_again_has_grown(
    readings: tuple[dict[str, int], ...], expected: dict[str, int]
) -> None:
    found: dict[str, int] = {}
    for last, now in pairwise(readings):
        found = grown(found, last, now)
    assert found == expected


class Node:
    """Counters in a loop, and what they tell."""

    def __init__(self, counters: dict[str, int]) -> None:
        self.now = counters
        self.go = threading.Event()
        self.go.set()
        self.reads = 0
        self.told: list[dict[str, int]] = []
        self.loop = Loop()
        self.counters = Counters(self.loop, self.told.append, self._read)
        self.until(1)

    def _read(self) -> dict[str, int]:
        found = dict(self.now)
        assert self.go.wait(10.0)
        self.reads += 1
        return found

    def until(self, reads: int) -> None:
        def turned() -> bool:
            self.loop.turn(0.01)
            return self.reads == reads and not self.counters.reading

        until(turned, f"{reads} readings", timeout=10.0)


def test_only_growth_is_told_and_once() -> None:
    node = Node({"a": 1, "b": 1})
    assert node.told == []
    node.counters.start_reading()
    node.until(2)
    assert node.told == []
    node.now = {"a": 5, "b": 1}
    node.counters.start_reading()
    node.until(3)
    node.counters.start_reading()
    node.until(4)
    assert node.told == [{"a": 4}]
    node.now = {"b": 2}  # a cannot be read any more
    node.counters.start_reading()
    node.until(5)
    assert node.told == [{"a": 4}, {"a": 4, "b": 1}]


def test_a_device_that_does_not_answer_holds_one_thread_and_the_loop_goes_on() -> None:
    node = Node({"a": 1})
    node.go.clear()
    for value in (2, 3, 4):
        node.now = {"a": value}
        node.counters.start_reading()
        node.loop.turn(0.0)
    assert node.reads == 1 and node.told == []
    node.go.set()
    node.until(3)  # what was asked for meanwhile is one more reading
    assert node.told[-1] == {"a": 3}


def test_what_could_not_be_read_at_first_counts_from_where_it_could() -> None:
    node = Node({})
    for reads, value in ((2, 7), (3, 9)):
        node.now = {"a": value}
        node.counters.start_reading()
        node.until(reads)
    assert node.told == [{"a": 2}]


def test_the_gravest_are_told_and_of_them_those_that_grew_most() -> None:
    node = Node({str(n): 0 for n in range(2 * MOST)} | {"mlx5_0 port 1 link_downed": 0})
    node.now = {str(n): n + 2 for n in range(2 * MOST)} | {"mlx5_0 port 1 link_downed": 1}
    node.counters.start_reading()
    node.until(2)
    (told,) = node.told
    most = {str(n): n + 2 for n in range(MOST + 1, 2 * MOST)}
    assert told == {"mlx5_0 port 1 link_downed": 1} | most


def test_the_end_of_a_reading_that_was_promised_is_told_also_without_growth() -> None:
    node = Node({"a": 1})
    assert not node.counters.promise()
    node.go.clear()
    node.counters.start_reading()
    assert node.counters.promise()
    node.counters.start_reading()  # asked for after the promise was made
    node.go.set()
    node.until(3)
    assert node.told == [{}]
    node.counters.start_reading()
    node.until(4)
    assert node.told == [{}]


def test_what_was_set_to_zero_grows_on() -> None:
    node = Node({"a": 5})
    for reads, value in ((2, 7), (3, 0), (4, 1)):
        node.now = {"a": value}
        node.counters.start_reading()
        node.until(reads)
    assert node.told == [{"a": 2}, {"a": 3}]


def test_a_reading_of_this_machine_takes_milliseconds_and_repeats() -> None:
    found = reading.read()
    assert reading.read().keys() >= found.keys()


class Hardware:
    """A node whose hardware is read by the agent; ``now``: what /sys says."""

    def __init__(self, now: Machine) -> None:
        self.now = now
        self.loop = Loop()
        self.reads = 0
        self.counters = Counters(self.loop, lambda _: None, dict, self._read)
        self.wait(lambda: self.reads == 1)
        self.loop.turn(0.01)

    def _read(self) -> Machine:
        self.reads += 1
        return self.now

    def wait(self, met: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.loop.turn(0.01)
            return met()

        until(turned, "the hardware is read", 5.0)

    def inspected(self) -> Machine:
        self.counters.inspect()
        assert self.counters.machine is None  # nothing of an earlier inspection is told again
        self.wait(lambda: self.counters.machine is not None)
        found = self.counters.machine
        assert found is not None
        return found


def test_a_link_that_was_narrow_from_the_beginning_is_not_told() -> None:
    always, later = "PCIe 0000:01:00.0: x8 of x16", "PCIe 0000:02:00.0: x4 of x16"
    node = Hardware(Machine(below=(always,), links={"ib0": 100.0}))
    node.now = Machine(below=(always, later), links={"ib0": 50.0}, counts={"n": 1})
    found = node.inspected()
    assert (found.below, found.links) == ((later,), {"ib0": 50.0})
    assert found.first_links == {"ib0": 100.0}
    node.now = Machine(counts={"n": 7})
    assert node.inspected().counts == {"n": 7}
