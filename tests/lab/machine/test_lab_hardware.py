"""The hardware that the lab's nodes claim to have, and what faults do to it, as data."""

import pytest

from lab.errors import LabError
from lab.machine import gpu_faults, hardware, kernlog
from lab.machine.hardware import HCAS, Hardware, Link

BOARD = Hardware("n1", 8)
GPU3 = "devices/pci0000:60/0000:60:01.0/0000:61:00.0"


def test_gpus_of_different_nodes_differ_and_stay() -> None:
    found = [hardware.uuid(node, index) for node in ("n1", "n2") for index in range(64)]
    assert len(set(found)) == len(found)
    assert hardware.uuid("n1", 0) == found[0]
    assert len({hardware.pci(index) for index in range(64)}) == 64
    assert len({hardware.serial("n1", index) for index in range(64)}) == 64


def test_sys_tree_shows_the_gpus_and_ports() -> None:
    tree = hardware.sys_tree(BOARD)
    links = [path for path in tree if path.startswith("bus/pci/devices/")]
    targets = {path: tree[path] for path in links}
    gpus = [
        address
        for address, link in targets.items()
        if isinstance(link, Link)
        and tree[f"{link.target.removeprefix('../../../')}/vendor"] == "0x10de\n"
        and str(tree[f"{link.target.removeprefix('../../../')}/class"]).startswith("0x03")
    ]
    assert len(gpus) == 8
    assert tree[f"{GPU3}/current_link_width"] == "16\n"
    assert tree[f"{GPU3}/driver"] == Link("../../../../bus/pci/drivers/nvidia")
    assert [path for path in tree if path.startswith("class/infiniband/")] == [
        f"class/infiniband/{hca}" for hca in HCAS
    ]


@pytest.mark.parametrize(
    ("nvml", "width", "speed"),
    [
        ({"gpu3.pcie.width": "8"}, "8\n", "32.0 GT/s PCIe\n"),
        ({"gpu3.pcie.generation": "1"}, "16\n", "2.5 GT/s PCIe\n"),
        ({"gpu.pcie.width": "4", "gpu2.pcie.width": "8"}, "4\n", "32.0 GT/s PCIe\n"),
        (
            {"gpu3.pcie.width": "NVML_ERROR_UNKNOWN", "gpu3.pcie.generation": "NVML_ERROR_UNKNOWN"},
            "16\n",
            "32.0 GT/s PCIe\n",
        ),
        ({"gpu3.lost": "handle"}, "63\n", "Unknown\n"),
        ({"gpu3.lost": "absent"}, None, None),
    ],
)
def test_sys_tree_follows_the_faults(
    nvml: dict[str, str], width: str | None, speed: str | None
) -> None:
    tree = hardware.sys_tree(Hardware("n1", 8, nvml))
    assert tree.get(f"{GPU3}/current_link_width") == width
    assert tree.get(f"{GPU3}/current_link_speed") == speed
    assert ("bus/pci/devices/0000:61:00.0" in tree) is (width is not None)
    assert "bus/pci/devices/0000:60:01.0" in tree  # its port


def test_a_port_counts_how_often_it_went_down() -> None:
    twice = BOARD.with_port("mlx5_1", False).with_port("mlx5_1", True).with_port("mlx5_1", False)
    tree = hardware.sys_tree(twice)
    port = next(path.rpartition("/")[0] for path in tree if "/mlx5_1/ports/1/state" in path)
    assert tree[f"{port}/state"] == "1: DOWN\n"
    assert tree[f"{port}/counters/link_downed"] == "2\n"
    back = hardware.sys_tree(twice.with_port("mlx5_1", True))
    assert back[f"{port}/state"] == "4: ACTIVE\n"


def test_changes_make_the_new_tree_of_the_old() -> None:
    old = hardware.sys_tree(BOARD)
    new = hardware.sys_tree(Hardware("n1", 8, {"gpu3.lost": "absent", "driver": "1.2"}))
    tree = dict(old)
    for path, value in hardware.changes(old, new):
        if value is None:
            del tree[path]
        else:
            tree[path] = value
    assert tree == new
    assert not list(hardware.changes(new, new))


def test_boot_log_is_over_before_anything_runs() -> None:
    lines = kernlog.boot_log(8)
    text = kernlog.records(lines, 0, 0, 100)
    assert len(text.splitlines()) == len(lines)
    assert int(text.splitlines()[-1].split(",")[2]) < 10_000
    assert "NVRM" not in kernlog.records(kernlog.boot_log(0), 0, 0, 100)


def after(*steps: tuple[str, str], index: int | None = 3) -> tuple[Hardware, list[str]]:
    """The board after some changes to GPU 3, and what the kernel logged."""
    board, log = BOARD, list[str]()
    for what, value in steps:
        done = gpu_faults.change(board, index, what, value)
        board = board.with_nvml(done.nvml)
        log += [line.text.removeprefix("NVRM: Xid (PCI:0000:61:00): ") for line in done.log]
    return board, log


@pytest.mark.parametrize(
    ("steps", "nvml", "begin"),
    [
        ([("xid", "79")], {}, ["79, GPU has fallen off the bus."]),
        ([("xid", "999 what so ever")], {}, ["999, what so ever"]),
        (
            [("ecc", "2"), ("ecc", "1")],
            {"gpu3.ecc.volatile_uncorrected": "1", "gpu3.ecc.aggregate_uncorrected": "3"},
            ["48, DBE", "48, DBE"],
        ),
        (
            [("lost", "handle")],
            {"gpu3.lost": "handle"},
            ["79, ", "NVRM: GPU 0000:61:00.0: GPU has", "NVRM: GPU 0000:61:00.0: GPU serial",
             "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"],
        ),
        ([("remap_failed", "1")], {"gpu3.remap.failed": "1"}, ["64, "]),
        ([("remap_pending", "1")], {"gpu3.remap.pending": "1", "gpu3.remap.uncorrected": "1"},
         ["63, "]),
        ([("pcie_width", "8"), ("temp", "95")],
         {"gpu3.pcie.width": "8", "gpu3.temperature.gpu": "95"}, []),
        ([("throttle", "hw-slowdown,hw-thermal")], {"gpu3.throttle": "0x48"}, []),
        ([("recovery_action", "1"), ("recovery_action", "1")], {"gpu3.recovery_action": "1"},
         ["154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"]),
        ([("set", "nvlink4.active=0")], {"gpu3.nvlink4.active": "0"}, []),
        ([("nvml_hang", "sleep")], {"gpu3.hang": "sleep"}, []),
        ([("ecc", "2"), ("heal", "")], {}, ["48, "]),
        # a reset cures what is volatile, not what is in the board
        ([("ecc", "2"), ("remap_pending", "1"), ("remap_failed", "1"), ("recovery_action", "1"),
          ("pcie_width", "8"), ("reset", "")],
         {"gpu3.ecc.aggregate_uncorrected": "2", "gpu3.remap.uncorrected": "1",
          "gpu3.remap.failed": "1", "gpu3.pcie.width": "8"},
         ["48, ", "63, ", "64, ", "154, "]),
        ([("recovery_action", "2"), ("reset", "")], {"gpu3.recovery_action": "2"}, ["154, "]),
    ],
)  # fmt: skip
def test_gpu_faults(steps: list[tuple[str, str]], nvml: dict[str, str], begin: list[str]) -> None:
    board, log = after(*steps)
    assert board.nvml == nvml
    assert [line[: len(b)] for line, b in zip(log, begin, strict=True)] == begin


def test_faults_of_the_node() -> None:
    steps = [("nvml_hang", "sleep"), ("driver", "1.2"), ("set", "init=NVML_ERROR_UNKNOWN")]
    board, log = after(*steps, index=None)
    assert board.nvml == {"hang": "sleep", "driver": "1.2", "init": "NVML_ERROR_UNKNOWN"}
    assert log == []
    assert after(*steps, ("heal", ""), index=None)[0].nvml == {}


@pytest.mark.parametrize(
    ("index", "what", "value", "word"),
    [
        (8, "xid", "79", "no GPU 8; there are: 0..7"),
        (None, "xid", "79", "say which GPU"),
        (3, "driver", "1.2", "about the node"),
        (None, "driver", "x", "wants a version"),
        (3, "xid", "x", "wants a number"),
        (3, "xid", "79 two\nlines", "one line"),
        (3, "pcie_width", "7", "one of 1, 2, 4, 8, 16, not 7"),
        (3, "temp", "-1", "wants 0..200"),
        (3, "lost", "no", "handle, calls, absent"),
        (3, "throttle", "hw-slowdown,x", "'x': want some of"),
        (3, "set", "no equals", "KEY=VALUE"),
        (3, "set", "a=b\nc=d", "KEY=VALUE"),
        (3, "nothing", "", "about the node"),
    ],
)
def test_bad_faults(index: int | None, what: str, value: str, word: str) -> None:
    with pytest.raises(LabError, match=word):
        gpu_faults.change(BOARD, index, what, value)


def test_no_gpus_no_faults_and_no_reset_of_what_is_gone() -> None:
    with pytest.raises(LabError, match="--gpus N"):
        gpu_faults.change(Hardware("n1", 0), 0, "xid", "79")
    gone = Hardware("n1", 8, {"gpu3.lost": "handle"})
    with pytest.raises(LabError, match="off the bus"):
        gpu_faults.change(gone, 3, "reset", "")
