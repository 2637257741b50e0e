"""The hardware of a lab's nodes and its faults, seen from inside by pynvml, /sys, /dev/kmsg."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gpu_nodes import BUSES, GPUS, LOOK, all_well, cat, differs, log, look, python

from lab import Cluster, LabError

pytest.importorskip("pynvml")


@pytest.fixture
def lab(gpu_lab: Cluster) -> Cluster:
    return gpu_lab


# -- a healthy node ---------------------------------------------------------------------------


def test_nvml_is_found_as_a_real_one_and_nodes_differ(lab: Cluster) -> None:
    found = [look(lab, node) for node in ("n1", "n2")]
    for gpus in found:
        assert [differs(gpu) for gpu in gpus] == [{}] * 8
        assert [gpu["bus"] for gpu in gpus] == [f"00000000:{bus.upper()}:00.0" for bus in BUSES]
    assert len({gpu["uuid"] for gpus in found for gpu in gpus}) == 16
    maps = "import pynvml, os; pynvml.nvmlInit(); print(open('/proc/self/maps').read())"
    assert f"{lab.spec.node_dir}/gpu/libnvidia-ml.so.1" in python(lab, "n1", maps)
    # nothing of it on the host
    assert "robust-lab" not in Path("/etc/ld.so.cache").read_text(errors="replace")


def test_sys_has_the_hardware_over_the_real_one(lab: Cluster) -> None:
    listing = lab.exec("n1", ["ls", GPUS], check=True).stdout.split()
    real = Path(GPUS)
    assert not real.is_dir() or {p.name for p in real.iterdir()} <= set(listing)
    wanted = {
        "vendor": "0x10de",
        "class": "0x030200",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
    }
    files = [f"{GPUS}/0000:{bus}:00.0/{name}" for bus in BUSES for name in wanted]
    rows = lab.exec("n1", ["cat", *files], check=True).stdout.splitlines()
    assert rows == [*wanted.values()] * 8
    assert "TOTAL_ERR_COR 0" in cat(lab, f"{GPUS}/0000:1b:00.0/aer_dev_correctable")
    assert cat(lab, "/sys/module/nvidia/version") == "570.133.20"
    assert "570.133.20" in cat(lab, "/proc/driver/nvidia/version")
    uuid = look(lab)[3]["uuid"]
    assert uuid in cat(lab, "/proc/driver/nvidia/gpus/0000:61:00.0/information")
    port = "/sys/class/infiniband/mlx5_3/ports/1"
    assert cat(lab, f"{port}/state") == "4: ACTIVE"
    assert cat(lab, f"{port}/rate") == "400 Gb/sec (4X NDR)"
    assert cat(lab, f"{port}/counters/link_downed") == "0"
    # what is the node's own, and what is the machine's
    assert lab.exec("n1", ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    assert cat(lab, "/sys/class/net/eth0/address") == "02:77:0a:4d:00:01"
    assert cat(lab, "/sys/devices/system/cpu/online")
    assert cat(lab, "/sys/kernel/mm/transparent_hugepage/enabled")
    assert lab.exec("n1", ["ls", "-A", "/sys/fs/cgroup"]).stdout == ""


def test_slurm_knows_the_device_files(lab: Cluster) -> None:
    gres = cat(lab, "/etc/slurm/gres.conf")
    found = re.search(r"File=(\S+)\[0-7\]", gres)
    assert found is not None
    for index in range(8):
        kind = lab.exec("n1", ["stat", "-c", "%F", f"{found[1]}{index}"], check=True).stdout
        assert kind == "character special file\n"


def test_kernel_log_boot_id_and_uptime_are_the_nodes(lab: Cluster) -> None:
    assert log(lab)[0].startswith("5,0,0,-;Linux version")
    assert any("NVRM: loading" in line for line in log(lab))
    ids = {cat(lab, "/proc/sys/kernel/random/boot_id", node) for node in ("n1", "n2")}
    ids.add(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    assert len(ids) == 3
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", i) for i in ids)
    lab.kmsg("n1", "something happened", level=3)
    level, _, micros, rest = log(lab)[-1].split(",", 3)
    uptime = float(cat(lab, "/proc/uptime").split()[0])
    assert (level, rest) == ("3", "-;something happened")
    assert 0 < int(micros) / 1e6 <= uptime < 3600
    assert "something happened" not in "\n".join(log(lab, "n2"))
    numbers = [int(line.split(",")[1]) for line in log(lab)]
    assert numbers == list(range(len(numbers)))


def test_run_and_disk_are_the_nodes(lab: Cluster) -> None:
    make = 'echo "$0" > /run/mine && echo "$0" > $1/mine && cat /run/mine $1/mine'
    for node in ("n1", "n2"):
        argv = ["sh", "-c", make, node, str(lab.disk)]
        assert lab.exec(node, argv, user=False, check=True).stdout.split() == [node, node]
    assert not Path("/run/mine").exists()


# -- faults of GPUs ---------------------------------------------------------------------------


def test_xid(lab: Cluster) -> None:
    lab.gpu("n1", 3, xid=79)
    lab.gpu("n1", 3, xid=31, text="my own words")
    lines = [line.partition(";")[2] for line in log(lab)]
    uuid = look(lab)[3]["uuid"]
    assert lines[-4] == f"NVRM: GPU at PCI:0000:61:00: {uuid}"
    assert lines[-3].startswith("NVRM: GPU Board Serial Number: ")
    assert lines[-2:] == [
        "NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:61:00): 31, my own words",
    ]
    assert log(lab)[-1].startswith("4,")
    assert not any("Xid" in line for line in log(lab, "n2"))


def test_counters_modes_and_their_healing(lab: Cluster) -> None:
    lab.gpu("n1", 0, ecc=2)
    lab.gpu("n1", 1, remap_pending=True)
    lab.gpu("n1", 2, remap_failed=True)
    lab.gpu("n1", 3, recovery_action=2)
    lab.gpu("n1", 4, temp=95, throttle="hw-slowdown,hw-thermal")
    lab.gpu("n1", 5, set={"nvlink4.active": 0})
    expected = [
        {"ecc": [2, 2]},
        {"remap": [0, 1, 1, 0]},
        {"remap": [0, 0, 0, 1]},
        {"action": 2},
        {"temp": 95, "throttle": 0x48},
        {"links": 17},
        {},
        {},
    ]
    assert [differs(gpu) for gpu in look(lab)] == expected
    codes = re.findall(r"Xid \(PCI:0000:(..):00\): (\d+),", "\n".join(log(lab)))
    assert codes[-4:] == [("1b", "48"), ("43", "63"), ("52", "64"), ("61", "154")]
    assert lab.faults()["n1"] == "gpu0+gpu1+gpu2+gpu3+gpu4+gpu5"
    assert all_well(lab, "n2")
    lab.gpu("n1", 4, heal=True)
    assert differs(look(lab)[4]) == {}
    lab.heal("n1")
    assert all_well(lab)
    assert lab.faults()["n1"] == "up"


def test_reset_cures_what_a_reset_cures(lab: Cluster) -> None:
    lab.gpu("n1", 6, ecc=1, remap_pending=True, recovery_action=1, pcie_width=8)
    before = log(lab)
    lab.gpu("n1", 6, reset=True)
    assert differs(look(lab)[6]) == {"ecc": [0, 1], "remap": [0, 1, 0, 0], "width": 8}
    assert log(lab) == before  # the driver says nothing
    lab.gpu("n1", 6, xid=43)  # but introduces the GPU again
    assert sum("GPU at PCI:0000:d1:00:" in line for line in log(lab)) == 2


def test_pcie_width_and_driver(lab: Cluster) -> None:
    lab.gpu("n1", 1, pcie_width=8)
    assert differs(look(lab)[1]) == {"width": 8}
    place = f"{GPUS}/0000:43:00.0"
    assert cat(lab, f"{place}/current_link_width") == "8"
    assert cat(lab, f"{place}/../current_link_width") == "8"
    assert cat(lab, f"{place}/max_link_width") == "16"
    lab.gpu("n1", driver="575.57.08")
    assert json.loads(python(lab, "n1", LOOK))[0] == "575.57.08"
    assert cat(lab, "/sys/module/nvidia/version") == "575.57.08"
    assert "575.57.08" in cat(lab, "/proc/driver/nvidia/version")
    assert lab.faults()["n1"] == "gpu1+nvml"


@pytest.mark.parametrize(("how", "count", "said"), [("handle", 8, "GPU is lost"),
                                                    ("calls", 8, "GPU is lost"),
                                                    ("absent", 7, None)])  # fmt: skip
def test_lost(lab: Cluster, how: str, count: int, said: str | None) -> None:
    lab.gpu("n1", 2, lost=True if how == "handle" else how)
    gpus = look(lab)
    assert len(gpus) == count
    if said:
        assert gpus[2] == said
        assert cat(lab, f"{GPUS}/0000:52:00.0/current_link_width") == "63"
    else:
        assert "00000000:52:00.0" not in [gpu["bus"] for gpu in gpus]
        assert "0000:52:00.0" not in lab.exec("n1", ["ls", GPUS]).stdout.split()
        assert lab.exec("n1", ["ls", "/proc/driver/nvidia/gpus/0000:52:00.0"]).returncode == 2
    tail = [line.partition(";")[2] for line in log(lab)][-4:]
    assert tail[0].endswith("): 79, GPU has fallen off the bus.")
    assert tail[3].endswith("154, GPU recovery action changed from 0x0 (None) to 0x2 "
                            "(Node Reboot Required)")  # fmt: skip
    with pytest.raises(LabError, match="off the bus"):
        lab.gpu("n1", 2, reset=True)
    lab.heal("n1")
    assert all_well(lab)
    assert cat(lab, f"{GPUS}/0000:52:00.0/current_link_width") == "16"


def test_init_failure(lab: Cluster) -> None:
    lab.gpu("n1", set={"init": "NVML_ERROR_DRIVER_NOT_LOADED"})
    done = lab.exec("n1", ["python", "-c", LOOK])
    assert done.returncode != 0
    assert "Driver Not Loaded" in done.stderr


def test_link(lab: Cluster) -> None:
    port = "/sys/class/infiniband/mlx5_1/ports/1"
    lab.link("n1", up=False, port="mlx5_1")
    assert cat(lab, f"{port}/state") == "1: DOWN"
    assert cat(lab, f"{port}/counters/link_downed") == "1"
    assert log(lab)[-1].endswith("mlx5_core 0000:40:00.0 ibp64s0: Link down")
    assert lab.faults()["n1"] == "mlx5_1"
    assert cat(lab, port.replace("mlx5_1", "mlx5_0") + "/state") == "4: ACTIVE"
    lab.link("n1", up=True, port="mlx5_1")
    assert cat(lab, f"{port}/state") == "4: ACTIVE"
    assert log(lab)[-1].endswith("Link up")
    with pytest.raises(LabError, match="mlx5_0 mlx5_1 mlx5_2 mlx5_3"):
        lab.link("n1", up=False, port="mlx5_9")


def test_bad_requests_leave_all_as_it_was(lab: Cluster) -> None:
    with pytest.raises(LabError, match="no GPU 9"):
        lab.gpu("n1", 9, nvml_hang="dstate")
    with pytest.raises(LabError, match="say which GPU"):
        lab.gpu("n1", xid=79)
    with pytest.raises(LabError, match="no faults there"):
        lab.gpu("head", 0, xid=79)
    with pytest.raises(LabError, match="knows no"):
        lab.ask("nonsense", node="n1")
    with pytest.raises(LabError, match="path"):
        lab.ask("fill", node="n1")
    assert lab.faults()["n1"] == "up"
    assert "stuck" not in cat(lab, "/proc/self/mountinfo")
