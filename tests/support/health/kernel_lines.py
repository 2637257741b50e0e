"""Lines of the kernel's log, of healthy nodes and of ill ones, and the families that read them.

Real lines (kernel releases 5.4 to 6.12), shortened, addresses changed.
"""

from __future__ import annotations

from typing import Any

from fake_system import FakeSystem

from health.checks.gpu import xid as xid_check
from health.checks.host import kernel_log, machine_check, pcie_aer
from health.finding import Finding
from health.node.system import LogRecord

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
FAMILIES = (machine_check, pcie_aer, kernel_log, xid_check)


def healthy(spread: float = 60.0) -> list[LogRecord]:
    rows = [line.partition(" ") for line in HEALTHY.splitlines()]
    return [LogRecord(n, n * spread, int(level), text) for n, (level, _, text) in enumerate(rows)]


def ghes(severity: str, section: str, number: str = "{1}") -> list[str]:
    head = f"{number}[Hardware Error]:"
    return [
        f"{head} Hardware error from APEI Generic Hardware Error Source: 4",
        f"{head} event severity: {severity}",
        f"{head}  Error 0, type: {severity}",
        f"{head}   section_type: {section}",
        f"{head}   physical_address: 0x0000000898b86020",
    ]


def run(family: Any, system: FakeSystem) -> list[Finding]:
    found: list[Finding] = family.CHECK.run(system)
    ids = {condition.check for condition in family.CHECK.conditions}
    assert {f.check for f in found} <= ids
    return found


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.check, f.device) for f in findings]
