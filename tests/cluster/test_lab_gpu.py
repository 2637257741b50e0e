"""The hardware of a lab's nodes and its faults, seen from inside by pynvml, /sys, /dev/kmsg."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Cluster, Lab, LabError, host

pytest.importorskip("pynvml")

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS = "/sys/bus/pci/devices"
PCI = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]

# Says what NVML says of every GPU; a GPU without a handle, or that fails, is its error's text.
_LOOK = """
import json, pynvml as N
N.nvmlInit()
out = []
for i in range(N.nvmlDeviceGetCount()):
    try:
        h = N.nvmlDeviceGetHandleByIndex(i)
        out.append({
            "uuid": N.nvmlDeviceGetUUID(h),
            "bus": N.nvmlDeviceGetPciInfo(h).busId,
            "ecc": [N.nvmlDeviceGetTotalEccErrors(h, 1, c) for c in (0, 1)],
            "remap": N.nvmlDeviceGetRemappedRows(h),
            "width": N.nvmlDeviceGetCurrPcieLinkWidth(h),
            "temp": N.nvmlDeviceGetTemperatureV(h, 0),
            "throttle": N.nvmlDeviceGetCurrentClocksEventReasons(h),
            "action": N.nvmlDeviceGetFieldValues(h, [230])[0].value.uiVal,
            "links": sum(N.nvmlDeviceGetNvLinkState(h, k) for k in range(18)),
        })
    except N.NVMLError as error:
        out.append(str(error))
print(json.dumps([N.nvmlSystemGetDriverVersion(), out]))
"""
WELL = {"ecc": [0, 0], "remap": [0, 0, 0, 0], "width": 16, "temp": 34, "throttle": 1, "action": 0,
        "links": 18}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0, gpus=8, scratch=True) as made:
        yield made


@pytest.fixture
def lab(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    for node in ("n1", "n2"):
        if cluster.faults()[node] != "up":
            cluster.heal(node)


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.02)


def python(lab: Lab, node: str, code: str) -> str:
    return lab.exec(node, ["python", "-c", code], check=True).stdout


def look(lab: Lab, node: str = "n1") -> list[Any]:
    gpus: list[Any] = json.loads(python(lab, node, _LOOK))[1]
    return gpus


def differs(gpu: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in gpu.items() if key in WELL and value != WELL[key]}


def cat(lab: Lab, path: str, node: str = "n1") -> str:
    return lab.exec(node, ["cat", path], check=True).stdout.strip()


def log(lab: Lab, node: str = "n1") -> list[str]:
    return cat(lab, "/dev/kmsg", node).splitlines()


# -- a healthy node ---------------------------------------------------------------------------


def test_nvml_is_found_as_a_real_one_and_nodes_differ(lab: Cluster) -> None:
    found = [look(lab, node) for node in ("n1", "n2")]
    for gpus in found:
        assert [differs(gpu) for gpu in gpus] == [{}] * 8
        assert [gpu["bus"] for gpu in gpus] == [f"00000000:{bus.upper()}:00.0" for bus in PCI]
    assert len({gpu["uuid"] for gpus in found for gpu in gpus}) == 16
    maps = "import pynvml, os; pynvml.nvmlInit(); print(open('/proc/self/maps').read())"
    assert f"{lab.spec.node_dir}/gpu/libnvidia-ml.so.1" in python(lab, "n1", maps)
    # nothing of it on the host
    assert "robust-lab" not in Path("/etc/ld.so.cache").read_text(errors="replace")


def test_sys_has_the_hardware_over_the_real_one(lab: Cluster) -> None:
    listing = lab.exec("n1", ["ls", GPUS], check=True).stdout.split()
    real = Path(GPUS)
    assert not real.is_dir() or {p.name for p in real.iterdir()} <= set(listing)
    for bus in PCI:
        place = f"{GPUS}/0000:{bus}:00.0"
        names = ("vendor", "class", "current_link_speed", "max_link_width")
        assert [cat(lab, f"{place}/{name}") for name in names] == [
            "0x10de", "0x030200", "32.0 GT/s PCIe", "16",
        ]  # fmt: skip
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
    assert [differs(gpu) for gpu in look(lab, "n2")] == [{}] * 8
    lab.gpu("n1", 4, heal=True)
    assert differs(look(lab)[4]) == {}
    lab.heal("n1")
    assert [differs(gpu) for gpu in look(lab)] == [{}] * 8
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
    assert json.loads(python(lab, "n1", _LOOK))[0] == "575.57.08"
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
    assert [differs(gpu) for gpu in look(lab)] == [{}] * 8
    assert cat(lab, f"{GPUS}/0000:52:00.0/current_link_width") == "16"


def test_init_failure(lab: Cluster) -> None:
    lab.gpu("n1", set={"init": "NVML_ERROR_DRIVER_NOT_LOADED"})
    done = lab.exec("n1", ["python", "-c", _LOOK])
    assert done.returncode != 0
    assert "Driver Not Loaded" in done.stderr


# -- what hangs -------------------------------------------------------------------------------

_ASK = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"


def state_of(lab: Lab, node: str, argv: list[str]) -> tuple[int, str]:
    """Pid and state of the node's process with this command line; 0 if there is none."""
    listing = lab.exec(node, ["ps", "-eo", "pid,stat,args"], user=False, check=True).stdout
    for line in listing.splitlines()[1:]:
        pid, state, args = line.split(None, 2)
        if args == " ".join(argv):
            return int(pid), state[0]
    return 0, ""


class Running:
    """A command in a node that hangs there; at the latest `heal` ends it."""

    def __init__(self, lab: Lab, node: str, argv: list[str], **popen: Any) -> None:
        self.lab, self.node, self.argv = lab, node, argv
        self.process = lab.popen(node, argv, user=False, text=True, **popen)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.lab.heal(self.node)
            self.process.kill()
        self.process.communicate(timeout=10)

    @property
    def state(self) -> str:
        return state_of(self.lab, self.node, self.argv)[1]

    def wait_state(self, state: str) -> None:
        eventually(lambda: self.state == state)

    def kill(self, number: str) -> None:
        """A signal to the command itself, from inside the node."""
        pid = state_of(self.lab, self.node, self.argv)[0]
        self.lab.exec(self.node, ["kill", number, str(pid)], user=False, check=True)


def test_nvml_that_sleeps_ends_by_sigkill_only(lab: Cluster) -> None:
    lab.gpu("n1", nvml_hang="sleep")
    with Running(lab, "n1", ["python", "-c", _ASK, "sleeper"]) as command:
        command.wait_state("S")
        pid = state_of(lab, "n1", command.argv)[0]

        def blocked() -> int:
            row = lab.exec("n1", ["grep", "SigBlk", f"/proc/{pid}/status"], check=True).stdout
            return int(row.split()[1], 16)

        eventually(lambda: blocked() & (1 << (signal.SIGTERM - 1)) != 0)
        command.kill("-TERM")
        assert command.state == "S"
        command.kill("-KILL")
        assert command.process.wait(10) == -signal.SIGKILL


def test_nvml_in_d_state_outlives_sigkill_until_it_is_healed(lab: Cluster) -> None:
    lab.gpu("n1", 5, nvml_hang="dstate")
    assert lab.faults()["n1"] == "gpu5"
    code = "import pynvml as N; N.nvmlInit(); N.nvmlDeviceGetName(N.nvmlDeviceGetHandleByIndex(5))"
    with Running(lab, "n1", ["python", "-c", code]) as command:
        command.wait_state("D")
        command.kill("-KILL")
        assert command.process.poll() is None
        assert command.state == "D"
        lab.gpu("n1", 5, heal=True)
        assert command.process.wait(10) == -signal.SIGKILL
    assert "stuck" not in cat(lab, "/proc/self/mountinfo")
    assert [differs(gpu) for gpu in look(lab)] == [{}] * 8


def test_nvml_in_d_state_goes_on_when_it_is_healed(lab: Cluster) -> None:
    lab.gpu("n1", nvml_hang="dstate")
    with Running(lab, "n1", ["python", "-c", _ASK], stdout=subprocess.PIPE) as command:
        command.wait_state("D")
        lab.heal("n1")
        assert command.process.communicate(timeout=10)[0] == "8\n"


def test_scratch_works_until_it_is_stale(lab: Cluster) -> None:
    scratch = str(lab.scratch)
    use = (
        "cd $0 && mkdir d && echo text > a && mv a d/b && cat d/b && rm d/b && rmdir d && ls -A && "
        "head -c 300000 /dev/zero > big && wc -c < big && rm big"
    )
    for _ in range(2):
        done = lab.exec("n1", ["sh", "-ec", use, scratch], check=True)
        assert done.stdout.split() == ["text", "300000"]
    assert lab.exec("n1", ["stat", f"{scratch}/none"]).returncode == 1
    if Path("/etc/fstab").exists():
        assert f"lab {scratch} fuse.labfs rw,_netdev 0 0" in cat(lab, "/etc/fstab")
    lab.stale_mount("n1")
    assert lab.faults()["n1"] == f"stale:{scratch}"
    with Running(lab, "n1", ["stat", f"{scratch}/x"], stderr=subprocess.PIPE) as command:
        command.wait_state("D")
        command.kill("-KILL")
        assert command.state == "D"
        lab.stale_mount("n1", heal=True)
        assert command.process.wait(10) == -signal.SIGKILL
    for node in ("n1", "n2"):
        done = lab.exec(node, ["sh", "-ec", use, scratch], check=True)
        assert done.stdout.split() == ["text", "300000"]


def test_stale_mount_of_its_own(lab: Cluster) -> None:
    place = lab.spec.node_dir / "projects"
    lab.stale_mount("n2", place)
    assert f"{place} " in cat(lab, "/proc/self/mountinfo", "n2")
    with Running(lab, "n2", ["ls", str(place)], stderr=subprocess.PIPE) as command:
        command.wait_state("D")
        lab.heal("n2")
        assert "connection abort" in command.process.communicate(timeout=10)[1]
    assert str(place) not in cat(lab, "/proc/self/mountinfo", "n2")
    with pytest.raises(LabError, match="no directory in the node"):
        lab.stale_mount("n2", "/no/such/place")
    with pytest.raises(LabError, match="no mount of the lab's"):
        lab.stale_mount("n2", "/tmp", heal=True)
    assert lab.faults()["n2"] == "up"


def test_the_lab_itself_does_not_hang_on_a_stale_mount(lab: Cluster) -> None:
    lab.stale_mount("n1")
    with pytest.raises(LabError, match="no answer from inside"):
        lab.fill("n1", f"{lab.scratch}/below")
    assert lab.faults()["n1"] == f"stale:{lab.scratch}"
    lab.heal("n1")
    assert lab.faults()["n1"] == "up"


def test_crash_with_processes_in_d_state(lab: Cluster) -> None:
    lab.gpu("n1", nvml_hang="dstate")
    lab.gpu("n1", 3, lost=True)
    lab.link("n1", up=False)
    lab.stale_mount("n1")
    boot = cat(lab, "/proc/sys/kernel/random/boot_id")
    lab.exec("n1", ["touch", f"{lab.disk}/kept"], user=False, check=True)
    one = Running(lab, "n1", ["python", "-c", _ASK])
    two = Running(lab, "n1", ["ls", str(lab.scratch)], stderr=subprocess.PIPE)
    with one, two:
        one.wait_state("D")
        two.wait_state("D")
        began = time.monotonic()
        lab.crash("n1")
        assert time.monotonic() - began < 5
        assert one.process.wait(5) == two.process.wait(5) == -signal.SIGKILL
    lab.heal("n1")
    # a boot: healthy hardware, a new log, a new id; the disk is as it was
    assert [differs(gpu) for gpu in look(lab)] == [{}] * 8
    assert cat(lab, "/sys/class/infiniband/mlx5_0/ports/1/state") == "4: ACTIVE"
    assert not any("Xid" in line for line in log(lab))
    assert cat(lab, "/proc/sys/kernel/random/boot_id") != boot
    uptime = float(cat(lab, "/proc/uptime").split()[0])
    booted = next(row for row in cat(lab, "/proc/stat").splitlines() if row.startswith("btime"))
    assert uptime < 300
    assert abs(time.time() - uptime - int(booted.split()[1])) < 5
    assert lab.exec("n1", ["ls", f"{lab.disk}/kept", str(lab.scratch)]).returncode == 0
    assert lab.faults()["n1"] == "up"


# -- links and disks --------------------------------------------------------------------------


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


def free(lab: Lab, path: str, node: str = "n1") -> list[int]:
    """Size and free bytes of a path's file system."""
    code = f"import os; s = os.statvfs({path!r}); print(s.f_frsize, s.f_blocks, s.f_bavail)"
    size, blocks, available = (int(word) for word in python(lab, node, code).split())
    return [size * blocks, size * available]


def test_fill_tmp(lab: Cluster) -> None:
    total, before = free(lab, "/tmp")
    assert total == 256 << 20
    lab.fill("n1", "/tmp")
    assert free(lab, "/tmp") == [total, 0]
    write = lab.exec("n1", ["python", "-c", "open('/tmp/more', 'wb', 0).write(b'x')"])
    assert "No space left" in write.stderr
    assert free(lab, "/tmp", "n2")[1] > 200 << 20
    lab.fill("n1", "/tmp", leave="5%")
    assert 0 <= free(lab, "/tmp")[1] - 0.05 * total <= 8192
    lab.fill("n1", "/tmp", leave=1 << 20)
    assert free(lab, "/tmp")[1] == 1 << 20
    assert lab.faults()["n1"] == "full:/tmp"
    lab.heal("n1")
    assert free(lab, "/tmp")[1] >= before - 8192


def test_fill_what_is_large_or_slurms_or_not_the_nodes(lab: Cluster) -> None:
    before = free(lab, "/dev/shm")
    lab.fill("n1", "/dev/shm")
    lab.fill("n1", lab.spec.spool)
    assert free(lab, "/dev/shm") == [256 << 20, 0]
    assert free(lab, str(lab.spec.spool))[1] == 0
    lab.heal("n1")
    assert free(lab, "/dev/shm") == before
    for path in ("/", "/etc", str(lab.shared), "/run"):
        with pytest.raises(LabError, match="not on a file system of the node's own"):
            lab.fill("n1", path)
    with pytest.raises(LabError, match="No such file"):
        lab.fill("n1", "/tmp/none")
    with pytest.raises(LabError, match="from the root"):
        lab.fill("n1", "tmp")


# -- Slurm's scripts --------------------------------------------------------------------------


def test_prolog_epilog_and_health_check_program() -> None:
    name = f"hooks-{os.getpid()}"
    hooks = host.ROOT / name / "shared"
    script = (
        f'#!/bin/sh\necho "$SLURM_SCRIPT_CONTEXT $SLURM_JOB_ID $SLURMD_NODENAME" >> {hooks}/ran\n'
    )
    conf: dict[str, str | int] = {"HealthCheckInterval": 1, "HealthCheckNodeState": "ANY"}
    for key in ("Prolog", "Epilog", "HealthCheckProgram"):
        conf[key] = str(hooks / key.lower())
    conf["SchedulerParameters"] = "nohold_on_prolog_fail,batch_sched_delay=0,sched_interval=1"
    with Cluster(name=name, nodes=2, standby=0, slurm_conf=conf) as lab:
        for key in ("prolog", "epilog", "healthcheckprogram"):
            (hooks / key).write_text(script)
            (hooks / key).chmod(0o755)
        lab.exec("head", ["srun", "-w", "n1", "true"], check=True)

        def ran() -> set[str]:
            path = hooks / "ran"
            return set(path.read_text().splitlines()) if path.exists() else set()

        wanted = {"prolog_slurmd 1 n1", "epilog_slurmd 1 n1", "  n1", "  n2"}
        eventually(lambda: wanted <= ran())
        # a prolog may drain its own node, and its reason stays
        drain = "scontrol update nodename=$SLURMD_NODENAME state=drain reason=robust:node:x; exit 1"
        (hooks / "prolog").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{drain}\n")
        job = lab.sbatch("#!/bin/sh\ntrue\n", ["-w", "n2", "--requeue"])
        eventually(lambda: lab.node_records()["n2"].get("Reason", "").startswith("robust:node:x"))
        eventually(lambda: lab.job(job)["Restarts"] == "1")
        assert lab.job(job)["Reason"] == "BeginTime"


# -- labs without, bad requests, the command line, what is left -------------------------------


def test_a_lab_without_gpus_has_its_own_log_and_no_more() -> None:
    with Cluster(nodes=1, standby=0) as lab:
        assert log(lab)[0].startswith("5,0,0,-;Linux version")
        lab.kmsg("n1", "hello")
        assert log(lab)[-1].endswith(";hello")
        lab.fill("n1")
        assert lab.exec("n1", ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
        lab.stale_mount("n1")
        assert lab.faults()["n1"] == f"full:/tmp+stale:{lab.scratch}"
        lab.heal("n1")
        assert lab.faults()["n1"] == "up"
        for call in (lambda: lab.gpu("n1", 0, xid=79), lambda: lab.link("n1", up=False)):
            with pytest.raises(LabError, match="--gpus N"):
                call()
        with pytest.raises(LabError, match="one line"):
            lab.kmsg("n1", "two\nlines")


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


def test_command_line(lab: Cluster) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "lab", words[0], "--name", lab.name, *words[1:]]
        return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    assert re.match(r"gpu n1 3 xid at 20", run("gpu", "n1", "3", "--xid", "79").stdout)
    assert any("(PCI:0000:61:00): 79," in line for line in log(lab))
    assert run("gpu", "n1", "0", "--ecc", "0", "--lost", "--set", "name=Odd").returncode == 0
    assert run("gpu", "n1", "--driver", "1.2.3", "--nvml-hang=dstate").returncode == 0
    assert run("gpu", "n1", "--heal").returncode == 0
    assert [differs(gpu) for gpu in look(lab)] == [{}] * 8
    assert "mlx5_2 down" in run("link", "n1", "--down", "--port", "mlx5_2").stdout
    assert run("kmsg", "n1", "a line", "--level", "6").returncode == 0
    assert log(lab)[-1].endswith(";a line")
    assert run("fill", "n1", "/tmp", "--leave", "10%").returncode == 0
    assert run("stale-mount", "n1").returncode == 0
    assert run("stale-mount", "n1", "--heal").returncode == 0
    assert re.search(r"n1 .*mlx5_2\+full:/tmp ", run("status").stdout)
    assert f"LAB_SCRATCH={lab.scratch}" in run("env").stdout
    for words in (["gpu", "n1"], ["gpu", "n1", "9", "--xid", "1"], ["gpu", "n7", "1", "--xid", "1"],
                  ["gpu", "n1", "1", "--set", "x"], ["fill", "n1", "/"],
                  ["gpu", "n1", "1", "--throttle", "x"]):  # fmt: skip
        bad = run(*words)
        assert (bad.returncode, bad.stderr[:5]) == (2, "lab: ")


_OWNER = """
import sys, time
from lab import Cluster
with Cluster(name=sys.argv[1], nodes=2, standby=0, gpus=2, scratch=True) as lab:
    lab.gpu("n1", nvml_hang="dstate")
    lab.stale_mount("n2")
    lab.popen("n1", ["python", "-c", "import pynvml; pynvml.nvmlInit()"], user=False)
    lab.popen("n2", ["ls", str(lab.scratch)])
    for node in ("n1", "n2"):
        while "D" not in lab.exec(node, ["ps", "-eo", "state="], user=False).stdout:
            time.sleep(0.02)
    print("stuck", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["owner", "reaper", "keeper", "down"])
def test_nothing_stays_of_what_hangs(victim: str) -> None:
    name = f"stuck-{os.getpid()}-{victim}"
    argv = [sys.executable, "-c", _OWNER, name]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "stuck\n"
            directory = Lab(name).spec.dir
            reaper = host.reaper_pid(directory)
            family = family_of(reaper)
            keeper = next(p for p, (parent, _) in family.items() if parent == reaper)
            victims = {"owner": owner.pid, "reaper": reaper, "keeper": keeper}
            if victim == "down":
                assert host.take_down(name)
            else:
                os.kill(victims[victim], signal.SIGKILL)
            eventually(lambda: not directory.exists(), 10)
            eventually(lambda: not family.items() & family_of(0).items(), 10)
        finally:
            owner.kill()
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert name not in host.lab_names()


def family_of(root: int) -> dict[int, tuple[int, str]]:
    """Parent and start time by pid of a process and all below it (0: of all; no zombies)."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(entry.name)] = (int(fields[1]), fields[19])
    if not root:
        return found
    below = {root}
    while more := {p for p, (parent, _) in found.items() if parent in below} - below:
        below |= more
    return {pid: found[pid] for pid in below if pid in found}
