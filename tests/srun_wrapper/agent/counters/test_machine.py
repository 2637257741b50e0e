"""A node's hardware and load, read from trees as /sys and /proc have them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from srun_wrapper.agent.counters.machine import read
from srun_wrapper.protocol.looking_messages import STOLEN, SWAPPED, THROTTLED, Machine
from srun_wrapper.protocol.messages import Inspect, Inspected


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HWMON, PCI = "sys/class/hwmon/hwmon3", "sys/bus/pci/devices/0000:17:00.0"
FULL = {
    f"{HWMON}/name": "coretemp\n",
    f"{HWMON}/temp1_input": "101000\n",
    f"{HWMON}/temp1_max": "85000\n",
    f"{HWMON}/temp1_crit": "100000\n",
    f"{HWMON}/temp1_label": "Package id 0\n",
    f"{HWMON}/temp2_input": "90000\n",  # its fans run, and it is not throttled
    f"{HWMON}/temp2_max": "85000\n",
    f"{HWMON}/temp2_crit": "100000\n",
    f"{HWMON}/temp3_input": "40000\n",  # names no limit
    f"{PCI}/driver/x": "",
    f"{PCI}/max_link_width": "16\n",
    f"{PCI}/current_link_width": "8\n",
    f"{PCI}/infiniband/mlx5_0/x": "",
    "sys/bus/pci/devices/0000:18:00.0/max_link_width": "16\n",  # no driver: not in use
    "sys/bus/pci/devices/0000:18:00.0/current_link_width": "1\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
    "sys/class/net/eth0/device/x": "",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/speed": "25000\n",
    "sys/class/net/eth1/device/x": "",
    "sys/class/net/eth1/operstate": "down\n",
    "sys/class/net/eth1/speed": "-1\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "7\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count": "9\n",
    "sys/devices/system/cpu/cpufreq/x": "",
    "proc/vmstat": "nr_free_pages 5\npswpin 123\npswpout 9\n",
    "proc/stat": "cpu  1 2 3 4 5 6 7 88 9 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n",
    "proc/pressure/cpu": "some avg10=52.81 avg60=47.94 avg300=30.08 total=1\nfull avg10=0.00\n",
    "proc/pressure/memory": "some avg10=9.00 avg60=0\nfull avg10=3.50 avg60=0.00\n",
}


def test_all_of_it(tmp_path: Path) -> None:
    assert read(tree(tmp_path, FULL)) == Machine(
        hot=("coretemp Package id 0: 101 °C, limit 100 °C",),
        below=("PCIe 0000:17:00.0 (mlx5_0): x8 of x16",),
        links={"mlx5_0 port 1": 200.0, "eth0": 25.0},
        counts={THROTTLED: 9, SWAPPED: 123, STOLEN: 88},
        load={"CPU": 52.81, "memory": 3.5},
    )


def test_a_machine_without_any_of_it(tmp_path: Path) -> None:
    assert read(tmp_path) == Machine()


def test_nonsense_says_nothing(tmp_path: Path) -> None:
    bad = {name: "\x00?\n" for name in FULL if not name.endswith(("operstate", "/x", "name"))}
    assert read(tree(tmp_path, FULL | bad)) == Machine()


def test_no_more_is_read_after_the_deadline(tmp_path: Path) -> None:
    found = read(tree(tmp_path, FULL), seconds=-1.0)
    assert not (found.hot or found.below or found.links) and found.load


def test_this_machine() -> None:
    assert isinstance(read(), Machine)


def test_older_programs_read_the_messages() -> None:
    """New fields are at the end: what lacks them, or has more, is understood."""

    class OldInspect(msgspec.Struct, array_like=True, tag="Inspect"):
        token: int
        window: float
        ask: bool = True

    class OldInspected(msgspec.Struct, array_like=True, tag="Inspected"):
        token: int
        window: float
        samples: tuple[int, ...]
        answering: tuple[str, ...] = ()

    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    new = encode(Inspect(1, 0.0, False, True))
    assert decode(new, type=OldInspect) == OldInspect(1, 0.0, False)
    said = encode(Inspected(1, 0.0, (), (), Machine()))
    assert decode(said, type=OldInspected) == OldInspected(1, 0.0, ())
    assert decode(encode(OldInspect(1, 0.0)), type=Inspect) == Inspect(1, 0.0)
    assert decode(encode(OldInspected(1, 0.0, ())), type=Inspected) == Inspected(1, 0.0, ())
