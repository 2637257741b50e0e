"""The families that read the kernel's log: machine checks, PCIe, disks, links, hangs.

Lines are real ones (kernel releases 5.4 to 6.12), shortened, addresses changed.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_system import UPTIME, FakeSystem, log
from hypothesis import given
from hypothesis import strategies as st

from health import xid_lines
from health.checks import kernel_log, machine_check, pcie_aer
from health.checks import xid as xid_check
from health.finding import Finding
from health.kernlog import ago, quoted
from health.system import LogRecord

# What healthy nodes say: boot, drivers, containers, programs that crash. Nothing of it is trouble.
HEALTHY = """\
6 Linux version 6.8.0-60-generic (buildd@lcy02-amd64-054) (x86_64-linux-gnu-gcc-13)
6 BERT: Boot Error Record Table support is enabled
6 GHES: APEI firmware first mode is enabled by APEI bit and WHEA _OSC.
6 mce: CPU0: Thermal monitoring enabled (TM1)
6 MCE: In-kernel MCE decoding enabled.
4 mce: CPU12: Core temperature above threshold, cpu clock throttled (total events = 1)
6 RAS: Correctable Errors collector initialized.
6 NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
6 EDAC MC: Ver: 3.0.0
6 EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0
6 EDAC skx MC0: HANDLING MCE MEMORY ERROR
6 rcu: INFO: rcu_preempt self-test passed
4 ACPI BIOS Error (bug): Could not resolve symbol [\\_SB.PCI0], AE_NOT_FOUND (20230628/psargs-330)
6 acpi PNP0A08:00: _OSC: OS now controls [PCIeHotplug PME AER PCIeCapability LTR DPC]
6 pcieport 0000:00:01.0: AER: enabled with IRQ 26
6 pcieport 0000:00:01.0: DPC: enabled with IRQ 26
6 pcieport 0000:00:01.0: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+
4 pcieport 0000:00:01.0: AER: Corrected error message received from 0000:01:00.0
4 nvme 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)
4 nvme 0000:01:00.0:   device [144d:a80a] error status/mask=00000001/0000e000
4 nvme 0000:01:00.0:    [ 0] RxErr                  (First)
6 nvme nvme0: pci function 0000:01:00.0
6 nvme nvme0: Shutdown timeout set to 10 seconds
6 nvme nvme0: 56/0/0 default/read/poll queues
4 nvme nvme0: I/O 87 QID 1 timeout, completion polled
4 nvme nvme1: I/O 192 QID 5 timeout, aborting
4 nvme nvme1: Abort status: 0x0
6 nvme0n1: p1 p2 p3
6 EXT4-fs (nvme0n1p2): mounted filesystem 3f1e with ordered data mode. Quota mode: none.
6 EXT4-fs (nvme0n1p2): re-mounted 3f1e r/w. Quota mode: none.
5 EXT4-fs (nvme0n1p2): error count since last fsck: 0
5 XFS (md0): Mounting V5 Filesystem
6 XFS (md0): Ending clean mount
6 BTRFS info (device sda3): using crc32c (crc32c-intel) checksum algorithm
4 BTRFS warning (device sda3): duplicate device /dev/sda3 devid 1 generation 12
3 blk_update_request: operation not supported error, dev loop7, sector 12 op 0x9:(WRITE_ZEROES)
3 I/O error, dev loop3, sector 2 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2
3 I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
3 I/O error, dev sr0, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2
3 I/O error, dev nvme0n1, sector 8192 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2
3 SQUASHFS error: Failed to read block 0x1d2: -5
2 EXT4-fs error (device loop3): ext4_find_entry:1455: inode #2: comm python: reading lblock 0
2 EXT4-fs (loop3): Remounting filesystem read-only
6 mlx5_core 0000:3b:00.0: firmware version: 28.39.3004
6 mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged
6 mlx5_core 0000:3b:00.0 ens1f0np0: Link down
6 mlx5_core 0000:3b:00.0 ens1f0np0: Link up
6 igb 0000:04:00.0 eno1: igb: eno1 NIC Link is Up 1000 Mbps Full Duplex, Flow Control: RX
6 IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready
6 bond0: (slave ens1): link status definitely up, 100000 Mbps full duplex
6 switch: port 3(p2b1) entered disabled state
6 docker0: port 1(veth12ab) entered blocking state
4 nvidia: loading out-of-tree module taints kernel.
6 NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build
3 NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ kernel_gsp.c:1476
6 python[2280636]: segfault at 0 ip 00007f2d5c sp 00007ffc error 4 in libc.so.6[7f2d5c]
6 traps: python[3121] general protection fault ip:7f2d sp:7ffc error:0 in libtorch.so[7f00]
6 perf: interrupt took too long (2509 > 2500), lowering kernel.perf_event_max_sample_rate to 79000
4 WARNING: CPU: 14 PID: 812 at drivers/gpu/drm/drm_gem.c:100 drm_gem_x+0x1/0x2
4 nfs: server 10.0.0.7 not responding, still trying
6 nfs: server 10.0.0.7 OK
3 LustreError: 11-0: scratch-OST0003-osc-ffff: operation ost_read to node 10.0.0.9 failed
4 hrtimer: interrupt took 21530 ns
6 systemd[1]: Started Slurm node daemon.
"""

FAMILIES = (machine_check, pcie_aer, kernel_log, xid_check)


def healthy(spread: float = 60.0) -> list[LogRecord]:
    rows = [line.partition(" ") for line in HEALTHY.splitlines()]
    return [LogRecord(n, n * spread, int(level), text) for n, (level, _, text) in enumerate(rows)]


def run(family: Any, system: FakeSystem) -> list[Finding]:
    found: list[Finding] = family.CHECK.run(system)
    ids = {condition.check for condition in family.CHECK.conditions}
    assert {f.check for f in found} <= ids
    return found


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.check, f.device) for f in findings]


def kernel(*lines: str, ago: float = 600.0, level: int = 3, **options: Any) -> FakeSystem:
    """A node up for a day, with these messages ``ago`` seconds before now."""
    kmsg = log(*lines, level=level, time=UPTIME - ago)
    return FakeSystem(kmsg=kmsg, options={"kernel_log": options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 60.0, 1200.0])
def test_a_healthy_log_is_no_trouble(family: Any, spread: float) -> None:
    assert run(family, FakeSystem(kmsg=healthy(spread))) == []


def test_everything_in_a_healthy_log_once_more_is_no_trouble_either() -> None:
    for family in FAMILIES:
        assert not [f for f in run(family, FakeSystem(kmsg=healthy() * 2)) if f.status == "FAIL"]


# --- what users can make the kernel say -----------------------------------------------------------

# Each begins with the name of a process: 15 characters that a user chooses.
FORGED = [
    ("NVRM: loading N", "[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"),
    ("NVRM: loading  ", "invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("NVRM: Xid (PCI:", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("Oops: 0 [#1]", ": page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL)"),
    ("Oops: 0 [#1]", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("kernel BUG at a", ": page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL)"),
    ("EDAC MC0: 1 UE", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("EXT4-fs error (", ": page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL)"),
    ("I/O error, dev ", " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"),
    ("a 0 b: Link down", "[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"),
    ("BUG: soft lockup", "[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"),
]


@pytest.mark.parametrize(("name", "rest"), FORGED)
def test_a_process_name_forges_nothing(name: str, rest: str) -> None:
    system = FakeSystem(kmsg=log(*[name[:15] + rest] * 20, level=3, time=UPTIME - 500))
    for family in FAMILIES:
        assert run(family, system) == []


def test_a_process_name_does_not_clear_a_fault() -> None:
    fault = "NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=x, Timeout after 6s of waiting"
    forged = "NVRM: loading N[4711]: segfault at 0 ip 0 sp 0 error 4 in x[0]"
    (found,) = run(xid_check, FakeSystem(kmsg=log(fault, forged, time=UPTIME - 500)))
    assert found.check == "xid-119"


# --- machine checks -------------------------------------------------------------------------------

UE = "mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 5: bea0000000000108"
UE_EXCEPTION = "mce: [Hardware Error]: CPU 5: Machine Check Exception: 5 Bank 1: bc00080001010135"
CE = "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 7: 8c00004000010090"
AMD_CE = (
    "[Hardware Error]: CPU:0 (17:31:0) MC27_STATUS[Over|CE|MiscV|-|-|-|SyndV|-|-|-]:"
    " 0xd82000000002080b"
)
AMD_UE = (
    "[Hardware Error]: CPU:3 (19:1:1) MC17_STATUS[-|UE|MiscV|AddrV|-|-|SyndV|-|-|-|-]:"
    " 0xbc2041000000011b"
)
EDAC_CE = "EDAC MC0: 2 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)"
EDAC_UE = "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)"
POISON = "Memory failure: 0x40fa6: Killing python:1296 due to hardware memory corruption"


def ghes(severity: str, section: str, number: str = "{1}") -> list[str]:
    head = f"{number}[Hardware Error]:"
    return [
        f"{head} Hardware error from APEI Generic Hardware Error Source: 4",
        f"{head} event severity: {severity}",
        f"{head}  Error 0, type: {severity}",
        f"{head}   section_type: {section}",
        f"{head}   physical_address: 0x0000000898b86020",
    ]


@pytest.mark.parametrize(
    ("lines", "at", "expected"),
    [
        ([UE], 500.0, ["mce-uncorrected"]),
        ([UE_EXCEPTION], 500.0, ["mce-uncorrected"]),
        ([UE], 4.2, ["mce-previous-boot"]),
        ([AMD_UE], 500.0, ["mce-uncorrected"]),
        ([EDAC_UE], 500.0, ["mce-uncorrected"]),
        ([POISON], 500.0, ["mce-uncorrected"]),
        (["Memory failure: 0x40fa6: recovery action for free buddy page: Recovered"], 500.0, []),
        (ghes("recoverable", "memory error"), 500.0, ["mce-uncorrected"]),
        (ghes("fatal", "general processor error"), 500.0, ["mce-uncorrected"]),
        (ghes("corrected", "memory error"), 500.0, []),
        (ghes("fatal", "PCIe error"), 500.0, []),
        (ghes("fatal", "memory error", ""), 4.0, ["mce-previous-boot"]),
        (ghes("fatal", "PCIe error", ""), 4.0, ["mce-previous-boot"]),
        ([CE] * 9, UPTIME - 500, []),
        ([CE] * 10, UPTIME - 500, ["mce-corrected"]),
        ([CE] * 10, 4.0, []),
        ([CE] * 10, UPTIME - 4000, []),
        ([AMD_CE] * 10, UPTIME - 500, ["mce-corrected"]),
        ([EDAC_CE] * 5, UPTIME - 500, ["mce-corrected"]),
        ([CE, EDAC_CE.replace("2 CE", "1 CE")] * 6, UPTIME - 500, []),  # told twice, counted once
        ([EDAC_CE.replace("2 CE", "1000 CE")], UPTIME - 500, ["mce-corrected-storm"]),
        (["mce: [Hardware Error]: Machine check events logged"] * 50, UPTIME - 500, []),
    ],
)
def test_machine_checks(lines: list[str], at: float, expected: list[str]) -> None:
    system = FakeSystem(kmsg=log(*lines, time=at))
    assert [f.check for f in run(machine_check, system)] == expected


def test_the_limits_of_machine_checks_are_settings() -> None:
    options = {"machine_check": {"corrected": 2, "storm": 3}}
    for times, check in ((1, []), (2, ["mce-corrected"]), (3, ["mce-corrected-storm"])):
        system = FakeSystem(kmsg=log(*[CE] * times, time=UPTIME - 99), options=options)
        assert [f.check for f in run(machine_check, system)] == check


# --- PCIe -----------------------------------------------------------------------------------------

GPU, NIC, DISK, BOARD = "0000:1b:00.0", "0000:3b:00.0", "0000:5e:00.0", "0000:04:00.0"
SWITCH, ROOT = "0000:19:00.0", "0000:17:01.0"


def tree(**counts: str) -> dict[str, Any]:
    """sysfs of a GPU below a switch, an adapter and an NVMe; counts like gpu_fatal="DLP 1"."""
    base = "/sys/bus/pci/devices"
    files = {f"{base}/{BOARD}/class": "0x020000\n"}
    for name, address in {"gpu": GPU, "nic": NIC, "disk": DISK, "switch": SWITCH}.items():
        for kind, total in (("fatal", "FATAL"), ("nonfatal", "NONFATAL"), ("correctable", "COR")):
            said = counts.get(f"{name}_{kind}", "")
            rows = [row.split() for row in said.split(",") if row]
            errors = sum(int(number) for _, number in rows)
            lines = [f"{what} {number}" for what, number in rows]
            text = "\n".join(["Undefined 0", *lines, f"TOTAL_ERR_{total} {errors}", ""])
            files[f"/sys/devices/pci0000:17/{address}/aer_dev_{kind}"] = text
    path = f"../../../devices/pci0000:17/{ROOT}/{SWITCH}/{GPU}"
    links = {
        "/sys/class/infiniband/mlx5_0/device": f"../../../{NIC}",
        "/sys/class/net/ib0/device": f"../../../{NIC}",
        "/sys/class/nvme/nvme0/device": f"../../../{DISK}",
        f"{base}/{GPU}": path,
        f"{base}/{NIC}": f"../../../devices/pci0000:3a/0000:3a:01.0/{NIC}",
        f"{base}/{DISK}": f"../../../devices/pci0000:5d/{DISK}",
    }
    for address in (GPU, NIC, DISK, SWITCH):
        for kind in ("fatal", "nonfatal", "correctable"):
            source = files.pop(f"/sys/devices/pci0000:17/{address}/aer_dev_{kind}")
            place = links.get(f"{base}/{address}", "").replace("../../..", "/sys")
            files[f"{place or f'{base}/{address}'}/aer_dev_{kind}"] = source
    files["/sys/class/net/lo/mtu"] = "65536\n"
    files[f"/proc/driver/nvidia/gpus/{GPU}/information"] = "Model: NVIDIA H100\n"
    return {"files": files, "links": links}


def aer(device: str, severity: str, driver: str = "nvidia") -> str:
    return f"{driver} {device}: PCIe Bus Error: severity={severity}, type=Data Link Layer, (x)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([aer(GPU, "Uncorrected (Fatal)")], [("aer-fatal", GPU)]),
        ([aer(NIC, "Uncorrectable (Fatal)", "mlx5_core")], [("aer-fatal", "mlx5_0")]),
        ([aer(DISK, "Uncorrected (Fatal)", "nvme")], [("aer-fatal", "nvme0")]),
        ([aer(SWITCH, "Uncorrected (Fatal)", "pcieport")], [("aer-fatal", SWITCH)]),
        ([aer(ROOT, "Uncorrected (Fatal)", "pcieport")], [("aer-fatal", ROOT)]),
        ([aer(BOARD, "Uncorrected (Fatal)", "igb")], [("aer-fatal-other", BOARD)]),
        ([aer("0000:99:00.0", "Uncorrected (Fatal)")], [("aer-fatal", "0000:99:00.0")]),
        ([aer(GPU, "Uncorrected (Non-Fatal)")], [("aer-nonfatal", GPU)]),
        ([aer(BOARD, "Uncorrected (Non-Fatal)", "igb")], []),
        ([aer(GPU, "Corrected")] * 50, []),
        ([aer(GPU, "Correctable")] * 2400, [("aer-corrected", GPU)]),
        (
            [f"pcieport {ROOT}: AER: Uncorrectable (Fatal) error message received from {GPU}"],
            [("aer-fatal", GPU)],
        ),
        (
            [f"pcieport {ROOT}: AER: Multiple Uncorrected (Non-Fatal) error received: {GPU}"],
            [("aer-nonfatal", GPU)],
        ),
        ([f"pcieport {ROOT}: DPC: containment event, status:0x1f01 source:0x0000"],
         [("aer-fatal", ROOT)]),
        (
            [*ghes("recoverable", "PCIe error")[1:4], f"{{1}}[Hardware Error]:   device_id: {GPU}"],
            [("aer-nonfatal", GPU)],
        ),
        (
            [*ghes("fatal", "PCIe error")[1:4], f"{{1}}[Hardware Error]:   device_id: {GPU}"],
            [("aer-fatal", GPU)],
        ),
        ([*ghes("fatal", "memory error"), f"{{1}}[Hardware Error]:   device_id: {GPU}"], []),
        ([f"nvidia {GPU}: AER: can't recover (no error_detected callback)"], []),
    ],
)  # fmt: skip
def test_pcie_errors_of_the_log(lines: list[str], expected: list[tuple[str, str]]) -> None:
    system = FakeSystem(**tree(), kmsg=log(*lines, time=500.0))
    assert told(run(pcie_aer, system)) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, []),
        ({"gpu_fatal": "DLP 1"}, [("aer-fatal", GPU)]),
        ({"gpu_nonfatal": "UnsupReq 7"}, []),
        ({"gpu_nonfatal": "UnsupReq 7,CmpltTO 1"}, [("aer-nonfatal", GPU)]),
        ({"nic_nonfatal": "CmpltTO 100"}, [("aer-nonfatal-many", "mlx5_0")]),
        ({"disk_correctable": "RxErr 2399"}, []),
        ({"disk_correctable": "RxErr 2400"}, [("aer-corrected", "nvme0")]),
        ({"switch_correctable": "BadTLP 2400"}, [("aer-corrected", SWITCH)]),
    ],
)
def test_pcie_errors_of_the_counters(
    counts: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert told(run(pcie_aer, FakeSystem(**tree(**counts)))) == expected


def test_the_same_pcie_error_is_counted_once() -> None:
    lines = [
        f"pcieport {ROOT}: AER: Uncorrected (Non-Fatal) error received: {GPU}",
        aer(GPU, "Uncorrected (Non-Fatal)"),
    ]
    (found,) = run(pcie_aer, FakeSystem(**tree(gpu_nonfatal="CmpltTO 1"), kmsg=log(*lines)))
    assert found.evidence.startswith("1 x, ")


def test_a_port_says_what_is_below() -> None:
    (found,) = run(pcie_aer, FakeSystem(**tree(switch_fatal="DLP 1")))
    assert f"the port above gpu {GPU}" in found.evidence


def test_a_node_without_any_of_it() -> None:
    assert run(pcie_aer, FakeSystem()) == []


def test_counters_in_an_unknown_form_are_no_errors() -> None:
    assert pcie_aer.parse_counters("") == {}
    assert pcie_aer.count(pcie_aer.parse_counters("DLP x\n\nTOTAL_ERR_FATAL -1\n")) == 0


# --- disks, links, hangs --------------------------------------------------------------------------

IO = "I/O error, dev nvme0n1, sector 95243456 op 0x0:(READ) flags 0x80700 phys_seg 13 prio class 2"
OLD_IO = "blk_update_request: I/O error, dev sda, sector 32776 op 0x1:(WRITE) flags 0x3000"
MEDIUM = "critical medium error, dev sdb, sector 1234 op 0x0:(READ) flags 0x0 phys_seg 1"
RESET = "nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller"
OLD_RESET = "nvme nvme4: I/O 528 QID 10 timeout, reset controller"
DOWN = "nvme nvme4: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff"
OOM = "Out of memory: Killed process 19284 (python) total-vm:1kB, anon-rss:1kB, UID:1000"
CGROUP = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB"
SOFT = "watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"
RCU = "rcu: INFO: rcu_sched self-detected stall on CPU"
LINK = "mlx5_core 0000:3b:00.0 ens1f0np0: Link down"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([IO], [("io-error", "nvme0n1")]),
        ([OLD_IO, MEDIUM], [("io-error", "sda"), ("io-error", "sdb")]),
        ([IO] * 9, [("io-error", "nvme0n1")]),
        ([IO] * 10, [("io-errors", "nvme0n1")]),
        ([RESET], [("nvme-reset", "nvme4")]),
        ([RESET, OLD_RESET, DOWN], [("nvme-resets", "nvme4")]),
        (["nvme nvme4: Disabling device after reset failure: -19"], [("nvme-down", "nvme4")]),
        (["nvme nvme0: Removing after probe failure status: -19"], [("nvme-down", "nvme0")]),
        (["nvme nvme0: Device not ready; aborting reset, CSTS=0x3"], [("nvme-down", "nvme0")]),
        (["block nvme0n1: no available path - failing I/O"], [("nvme-down", "nvme0n1")]),
        (
            ["md/raid0md0: Disk failure on nvme0n1p1 detected, failing array."],
            [("nvme-down", "md0")],
        ),
        (
            ["EXT4-fs error (device sdb7): ext4_get_branch:171: inode #8: block 3: comm x: bad"],
            [("fs-error", "sdb7")],
        ),
        (["Aborting journal on device sdb7-8."], [("fs-error", "sdb7")]),
        (["Aborting journal on device sda3:8."], [("fs-error", "sda3")]),
        (["XFS (nvme1n1): Metadata corruption detected at xfs_agf"], [("fs-error", "nvme1n1")]),
        (["XFS (dm-0): log I/O error -5"], [("fs-error", "dm-0")]),
        (["XFS (sda1): Corruption detected. Unmount and run xfs_repair"], [("fs-error", "sda1")]),
        (["BTRFS error (device sda2 state EA): bdev x errs: wr 1"], [("fs-error", "sda2")]),
        (["EXT4-fs (md0): Remounting filesystem read-only"], [("fs-readonly", "md0")]),
        ([OOM, CGROUP], [("oom", "")]),
        (["INFO: task kworker/u8:3:1177 blocked for more than 120 seconds."], [("hung-task", "")]),
        ([SOFT], [("soft-lockup", "")]),
        ([RCU, SOFT] * 2, [("soft-lockup", "")]),
        ([RCU, SOFT, SOFT] * 2, [("soft-lockups", "")]),
        (["NMI watchdog: Watchdog detected hard LOCKUP on cpu 3"], [("hard-lockup", "")]),
        (["watchdog: Watchdog detected hard LOCKUP on cpu 3"], [("hard-lockup", "")]),
        (["BUG: unable to handle page fault for address: ffffa0"], [("kernel-oops", "")]),
        (["Oops: 0000 [#1] PREEMPT SMP NOPTI"], [("kernel-oops", "")]),
        (["Oops: Oops: 0002 [#1] SMP NOPTI"], [("kernel-oops", "")]),
        (["Internal error: Oops: 0000000096000004 [#1] SMP"], [("kernel-oops", "")]),
        (["kernel BUG at fs/ext4/inode.c:847!"], [("kernel-oops", "")]),
        (
            ["general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP"],
            [("kernel-oops", "")],
        ),
        ([LINK] * 2, []),
        ([LINK] * 3, [("link-flaps", "ens1f0np0")]),
        ([LINK] * 10, [("link-flapping", "ens1f0np0")]),
        (["igb 0000:04:00.0 eno1: igb: eno1 NIC Link is Down"] * 3, [("link-flaps", "eno1")]),
        (["bnxt_en 0000:5e:00.0 eth2: NIC Link is Down"] * 3, [("link-flaps", "eth2")]),
        (["ixgbe 0000:01:00.0: eth0: NIC Link is Down"] * 3, [("link-flaps", "eth0")]),
        (["tg3 0000:02:00.0 em1: Link is down"] * 3, [("link-flaps", "em1")]),
        (["e1000e: eth0 NIC Link is Down"] * 3, [("link-flaps", "eth0")]),
        (["switch: port 3(p2b1) entered disabled state"] * 90, []),
    ],
)
def test_trouble_in_the_log(lines: list[str], expected: list[tuple[str, str]]) -> None:
    assert told(run(kernel_log, kernel(*lines))) == expected


@pytest.mark.parametrize(
    ("line", "times", "hours", "still"),
    [
        (OOM, 1, 1.1, False),
        (SOFT, 9, 1.1, False),
        (LINK, 20, 1.1, False),
        (IO, 20, 3, True),
        (RESET, 20, 3, True),
        (
            DOWN.replace("controller is down; will reset", "Removing after probe failure"),
            1,
            23,
            True,
        ),
        ("EXT4-fs error (device sdb7): ext4_get_branch:171: x", 1, 23, True),
    ],
)
def test_old_stories(line: str, times: int, hours: float, still: bool) -> None:
    system = kernel(*[line] * times, ago=hours * 3600)
    assert bool(run(kernel_log, system)) is still


def test_an_error_of_three_days_ago_is_over() -> None:
    system = FakeSystem(kmsg=log(*[IO] * 20, OOM, time=1000.0), uptime=3 * 86400.0)
    assert run(kernel_log, system) == []


def test_links_may_come_and_go_while_a_node_starts() -> None:
    system = FakeSystem(kmsg=log(*[LINK] * 20, time=20.0), uptime=400.0)
    assert run(kernel_log, system) == []


def test_the_limits_are_settings() -> None:
    assert told(run(kernel_log, kernel(IO, io_errors=1))) == [("io-errors", "nvme0n1")]
    assert told(run(kernel_log, kernel(LINK, flaps=1))) == [("link-flaps", "ens1f0np0")]
    assert told(run(kernel_log, kernel(LINK, flaps=9, flapping=1))) == [
        ("link-flapping", "ens1f0np0")
    ]
    assert told(run(kernel_log, kernel(OOM, recent=60.0))) == []


def test_info_about_links_counts_but_other_info_does_not() -> None:
    assert told(run(kernel_log, kernel(*[LINK] * 3, level=6))) == [("link-flaps", "ens1f0np0")]
    assert run(kernel_log, kernel(OOM, level=6)) == []


def test_the_evidence_is_one_clean_line() -> None:
    text = OOM.replace("python", "x\x1b[31m\n\ty")
    (found,) = run(kernel_log, kernel(text))
    assert found.evidence.isprintable()
    assert found.evidence.startswith(
        '1 x, last 10 min ago: "Out of memory: Killed process 19284 (x'
    )
    assert quoted("a" * 1000) == '"' + "a" * 240 + '"'
    assert [ago(s) for s in (5, 90, 600, 9000, 200_000)] == [
        "5 s",
        "90 s",
        "10 min",
        "2 h",
        "2 days",
    ]


def test_a_log_that_cannot_be_read_is_no_clean_log() -> None:
    for family in FAMILIES:
        with pytest.raises(PermissionError):
            family.CHECK.run(FakeSystem(kmsg=PermissionError(1, "Operation not permitted")))
        assert family.CHECK.closes_on_error


pieces = st.sampled_from(
    [word for line in HEALTHY.splitlines() for word in line.split(" ")]
    + [*IO.split(), *RESET.split(), *SOFT.split(), *LINK.split(), *UE.split(), *EDAC_UE.split()]
    + ["NVRM:", "Xid", "(PCI:0000:3b:00):", "79,", "{1}[Hardware", "Error]:", "event", "severity:"]
)


@given(st.lists(st.one_of(st.text(), st.lists(pieces, max_size=9).map(" ".join)), max_size=20))
def test_no_text_makes_a_check_fail(texts: list[str]) -> None:
    system = FakeSystem(kmsg=log(*texts), **tree())
    for family in FAMILIES:
        for finding in run(family, system):
            assert finding.evidence and "\n" not in finding.evidence


def test_the_prefix_of_the_parser_covers_its_forms() -> None:
    assert all(
        text.startswith(xid_lines.PREFIXES) for text in ("NVRM: Xid (", "nvidia-nvswitch0: SXid")
    )
