"""A healthy GPU node's /proc and /sys, as far as the host and fabric families read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fake_system import NOW, FakeSystem

from health.checks.host import clock, cpu, disk, memory, mounts, processes, services, slurmd
from health.checks.network import ethernet, infiniband
from health.finding import Finding
from health.node.system import Disk, PathEntry

GIB = 1 << 30
CHECKS = tuple(
    family.CHECK
    for family in (
        *(mounts, disk, memory, cpu, processes),
        *(services, clock, ethernet, infiniband, slurmd),
    )
)
SPOOL = "/var/spool/slurmd"

MOUNTINFO = """\
22 27 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
23 27 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
24 27 0:6 / /dev rw,nosuid shared:8 - devtmpfs devtmpfs rw,size=4096k,mode=755
25 24 0:23 / /dev/shm rw,nosuid,nodev shared:9 - tmpfs tmpfs rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
40 27 259:3 / /tmp rw,relatime shared:30 - xfs /dev/nvme1n1 rw,attr2,inode64
50 27 0:50 / /home rw,relatime shared:40 - nfs4 srv:/home rw,vers=4.2,hard,addr=10.0.0.1
51 27 0:51 / /scratch rw shared:41 - lustre 10.0.0.2@o2ib:/scratch rw,flock
52 27 0:52 / /software ro,relatime shared:42 - nfs4 srv:/software ro,vers=4.2,hard
"""
FSTAB = """\
# <file system> <mount point> <type> <options> <dump> <pass>
UUID=0a1b / ext4 errors=remount-ro 0 1
/dev/nvme1n1 /tmp xfs defaults 0 0
srv:/home /home nfs4 hard,_netdev 0 0
10.0.0.2@o2ib:/scratch /scratch lustre flock,_netdev 0 0
srv:/software /software nfs4 ro,hard,_netdev 0 0
srv:/archive /archive nfs4 noauto 0 0
"""
MEMINFO = """\
MemTotal:       2113560000 kB
MemFree:        2000000000 kB
MemAvailable:   2050000000 kB
AnonPages:         3145728 kB
Shmem:             1048576 kB
SwapTotal:         8388608 kB
SwapFree:          8388608 kB
SwapCached:              0 kB
HugePages_Total:         0
HugePages_Free:          0
Hugepagesize:         2048 kB
"""
ROUTE = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    "bond0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    "bond0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
)
SLURM_CONF = f"""\
ClusterName=c
AuthType=auth/munge
SlurmdSpoolDir={SPOOL}
NodeName=n[1-4] CPUs=224 RealMemory=2000000 Gres=gpu:h100:8
"""


def process(
    pid: int,
    name: str,
    state: str = "S",
    *,
    uid: int = 0,
    parent: int = 1,
    flags: int = 0x400000,
    cgroup: str = "/system.slice/x.service",
    wchan: str = "",
    stack: str = "",
    killed: bool = False,
    threads: int = 1,
) -> dict[str, Any]:
    """The files and the entry of one process: {"files": …, "entries": …}."""
    base = f"/proc/{pid}"
    pending = "0000000000000100" if killed else "0000000000000000"
    numbers = "0 " * 10 + f"{threads} 0 {1000 + pid}"
    return {
        "files": {
            f"{base}/stat": f"{pid} ({name}) {state} {parent} 1 1 0 -1 {flags} {numbers} 0 0\n",
            f"{base}/comm": name[:15] + "\n",
            f"{base}/cgroup": f"0::{cgroup}\n",
            f"{base}/wchan": wchan,
            f"{base}/stack": stack,
            f"{base}/status": f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\n"
            f"SigPnd:\t0000000000000000\nShdPnd:\t{pending}\n",
        },
        "entries": {base: PathEntry("dir", 0o555, uid, 0, NOW)},
    }


def port(adapter: str, state: str = "4: ACTIVE", **more: str) -> dict[str, str]:
    """The files of an adapter's first port; ``more``: link, rate, physical, board, firmware, and
    counters by name."""
    base = f"/sys/class/infiniband/{adapter}"
    up = state == "4: ACTIVE"
    out = {
        f"{base}/board_id": more.pop("board", "MT_0000000838") + "\n",
        f"{base}/fw_ver": more.pop("firmware", "28.39.1002") + "\n",
        f"{base}/ports/1/state": state + "\n",
        f"{base}/ports/1/phys_state": more.pop("physical", "5: LinkUp" if up else "2: Polling"),
        f"{base}/ports/1/rate": more.pop("rate", "400 Gb/sec (4X NDR)") + "\n",
        f"{base}/ports/1/link_layer": more.pop("link", "InfiniBand") + "\n",
        f"{base}/ports/1/counters/port_rcv_packets": "123456789\n" if up else "0\n",
    }
    for name in ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors"):
        out[f"{base}/ports/1/counters/{name}"] = "0\n"
    for name in ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence"):
        out[f"{base}/ports/1/hw_counters/{name}"] = "0\n"
    for name, value in more.items():
        group = "hw_counters" if f"{base}/ports/1/hw_counters/{name}" in out else "counters"
        out[f"{base}/ports/1/{group}/{name}"] = value
    return out


def interface(name: str, carrier: str = "1", speed: str = "100000", **more: str) -> dict[str, str]:
    """The files of a network interface; a slash in a name of ``more`` is written as __."""
    base = f"/sys/class/net/{name}"
    out = {
        f"{base}/carrier": carrier + "\n",
        f"{base}/operstate": ("up" if carrier == "1" else "down") + "\n",
        f"{base}/speed": speed + "\n",
        f"{base}/duplex": "full\n",
        f"{base}/carrier_down_count": "1\n",
        f"{base}/statistics/rx_crc_errors": "0\n",
        f"{base}/statistics/rx_packets": "1000000000\n",
    }
    return out | {f"{base}/{key.replace('__', '/')}": value for key, value in more.items()}


def files() -> dict[str, Any]:
    out: dict[str, Any] = {
        "/proc/self/mountinfo": MOUNTINFO,
        "/etc/fstab": FSTAB,
        "/proc/meminfo": MEMINFO,
        "/proc/loadavg": "0.20 0.31 0.40 1/3000 9999\n",
        "/proc/stat": "cpu 1 2 3\n" + "".join(f"cpu{i} 1 2 3\n" for i in range(224)) + "intr 1\n",
        "/proc/sys/kernel/pid_max": "4194304\n",
        "/proc/sys/kernel/threads-max": "16000000\n",
        "/proc/net/route": ROUTE,
        "/etc/hosts": "127.0.0.1 localhost\n10.0.0.11 n1\n",
        "/etc/slurm/slurm.conf": SLURM_CONF,
        "/run/munge/munged.pid": "900\n",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        "/sys/devices/system/cpu/online": "0-223\n",
        "/sys/devices/system/cpu/present": "0-223\n",
        "/sys/devices/system/cpu/offline": "\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "3800000\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000\n",
        "/sys/devices/system/edac/mc/mc0/ue_count": "0\n",
        "/sys/devices/system/edac/mc/mc0/ce_count": "3\n",
        "/sys/devices/system/edac/mc/mc0/seconds_since_reset": "864000\n",
        "/sys/class/nvme/nvme0/state": "live\n",
        "/sys/class/nvme/nvme0/transport": "pcie\n",
        "/sys/bus/pci/drivers/nvidia-nvswitch/0000:05:00.0/class": "0x068000\n",
        "/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.events": (
            "populated 1\nfrozen 0\n"
        ),
    }
    out |= interface("bond0", speed="200000", bonding__slaves="eth0 eth1\n")
    out |= interface("eth0") | interface("eth1") | interface("eth2", carrier="0")
    for index in range(8):
        out |= port(f"mlx5_{index}")
    return out


def healthy(
    processes: tuple[dict[str, Any], ...] = (),
    *,
    more: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    **overrides: Any,
) -> FakeSystem:
    """The node; ``more`` files, files ``without``; other keywords are FakeSystem's and are laid
    over what the healthy node has."""
    tree = files()
    entries: dict[str, PathEntry] = {
        "/run/munge/munge.socket.2": PathEntry("socket", 0o777, 0, 0, NOW),
        **overrides.pop("entries", {}),
    }
    for one in (process(1, "systemd"), process(900, "munged", uid=990), *processes):
        tree |= one["files"]
        entries |= one["entries"]
    tree |= more or {}
    for path in without:
        del tree[path]
    roomy = Disk(1000 * GIB, 800 * GIB, 60_000_000, 50_000_000, False)
    disks = dict.fromkeys(("/", "/tmp", "/var", "/var/tmp", "/dev/shm", SPOOL), roomy)
    probes = dict.fromkeys(("/home", "/scratch", "/software", SPOOL))
    return FakeSystem(
        tree,
        entries=entries,
        dirs=[SPOOL, "/tmp", "/var/tmp", "/dev/shm", *overrides.pop("dirs", ())],
        disks=disks | overrides.pop("disks", {}),
        probes=probes | overrides.pop("probes", {}),
        **overrides,
    )


def ids(found: list[Finding]) -> list[tuple[str, str, str]]:
    """(status, id, device) of each finding."""
    return [(finding.status, finding.check, finding.device) for finding in found]
