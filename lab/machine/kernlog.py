"""The kernel log of a lab's node, as lines of /dev/kmsg (pure).

The texts of NVIDIA's driver are those of its open kernel modules (595.45.04, Xids by
`nvErrorLog_va`, `krcReportXid`); it prints without a level, so with the kernel's default, 4.
"""

from collections.abc import Iterable
from typing import NamedTuple

from lab.machine.hardware import DRIVER, HCAS, hca_pci, pci, serial, uuid

INFO, NOTICE, WARNING, ERR = 6, 5, 4, 3


class Line(NamedTuple):
    """A message of the kernel: syslog severity (0-7) and text."""

    level: int
    text: str


def record(line: Line, number: int, microseconds: int) -> str:
    """The line as /dev/kmsg shows it; `microseconds` since boot."""
    return f"{line.level},{number},{microseconds},-;{line.text}\n"


def boot_log(gpus: int) -> list[Line]:
    """Return the lines of a node's boot."""
    lines = [
        Line(NOTICE, "Linux version 6.1.0-28-amd64 (debian-kernel@lists.debian.org) (gcc-12 "
             "(Debian 12.2.0-14) 12.2.0, GNU ld (GNU Binutils for Debian) 2.40) "
             "#1 SMP PREEMPT_DYNAMIC Debian 6.1.119-1 (2024-11-22)"),
        Line(INFO, "Command line: BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro quiet"),
        Line(INFO, "BIOS-provided physical RAM map:"),
        Line(INFO, "DMI: Supermicro SYS-821GE-TNHR/X13DEG-OAD, BIOS 2.1a 12/06/2023"),
        Line(INFO, "smpboot: Allowing 8 CPUs, 0 hotplug CPUs"),
        Line(INFO, "ACPI: Core revision 20220331"),
        Line(INFO, "mce: CPU0: Thermal monitoring enabled (TM1)"),
        Line(INFO, "pcieport 0000:17:01.0: AER: enabled with IRQ 26"),
        Line(INFO, "nvme nvme0: 8/0/0 default/read/poll queues"),
        Line(INFO, "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. "
             "Quota mode: none."),
    ]  # fmt: skip
    return lines + _accelerators(gpus) if gpus else lines


def _accelerators(gpus: int) -> list[Line]:
    lines = [Line(INFO, f"mlx5_core {hca_pci(hca)}: firmware version: 28.39.3560") for hca in HCAS]
    lines += [link(hca, True) for hca in HCAS]
    lines += [
        Line(WARNING, "nvidia: loading out-of-tree module taints kernel."),
        Line(INFO, "nvidia-nvlink: Nvlink Core is being initialized, major device number 511"),
    ]
    lines += [
        Line(INFO, f"nvidia {pci(index)}: enabling device (0140 -> 0142)") for index in range(gpus)
    ]
    lines += [
        Line(WARNING, f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  "
             "Release Build  (dvs-builder@U22-A23-20-2)  Sun Mar 23 00:20:12 UTC 2025"),
        Line(INFO, "nvidia-uvm: Loaded the UVM driver, major device number 509."),
    ]  # fmt: skip
    return lines


def link(hca: str, up: bool) -> Line:
    """A port of an HCA goes up or down, named by its interface as udev names it."""
    address = hca_pci(hca)
    return Line(INFO, f"mlx5_core {address} {interface(hca)}: Link {'up' if up else 'down'}")


def interface(hca: str) -> str:
    return f"ibp{int(hca_pci(hca).split(':')[1], 16)}s0"


# -- NVIDIA -----------------------------------------------------------------------------------

RECOVERY = {
    0: "None",
    1: "GPU Reset Required",
    2: "Node Reboot Required",
    3: "Drain P2P",
    4: "Drain and Reset",
}

_PROCESS = "pid=4242, name=python3"

# The text of a code when no other is asked for.
XID_TEXTS = {
    13: f"{_PROCESS}, Graphics SM Warp Exception on (GPC 3, TPC 4, SM 1): Out Of Range Address",
    31: f"{_PROCESS}, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2 "
        "faulted @ 0x7f1e_4a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: f"{_PROCESS}, Ch 00000018",
    45: f"{_PROCESS}, Ch 00000008",
    46: "GPU stopped processing",
    48: "DBE (double bit error) ECC Error",
    63: "Row Remapper: New row (0x0000000401a0b4b3) marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Failed to remap row (0x0000000401a0b4b3)",
    74: "NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "GPU has fallen off the bus.",
    92: "High single bit ECC error rate detected",
    94: f"{_PROCESS}, Contained: SM (0x1). RST: No, D-RST: No",
    95: "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    109: f"{_PROCESS}, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x4c001",
    119: f"{_PROCESS}, Timeout after 6s of waiting for RPC response from GPU0 GSP! "
         "Expected function 76 (GSP_RM_CONTROL) (0x20803039 0x4).",
    120: "GSP task exception: partition:4#0, task:1",
    140: "Unrecovered ECC error: DRAM:0, LTC:0, MMU:1, PCIE:0",
    149: "NETIR_LINK_EVT Fatal   XC0 i0 Link 05 "
         "(0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
}  # fmt: skip


def xid(index: int, code: int, text: str = "") -> Line:
    """The line of an Xid; without `text` one that is usual for the code."""
    address = pci(index).rpartition(".")[0]
    text = text or XID_TEXTS.get(code, "")
    return Line(WARNING, f"NVRM: Xid (PCI:{address}): {code}, {text}")


def introduction(node: str, index: int) -> list[Line]:
    """Return the driver's lines before a GPU's first Xid since it was loaded or reset."""
    address = pci(index).rpartition(".")[0]
    return [
        Line(WARNING, f"NVRM: GPU at PCI:{address}: {uuid(node, index)}"),
        Line(WARNING, f"NVRM: GPU Board Serial Number: {serial(node, index)}"),
    ]


def fallen_off(node: str, index: int) -> list[Line]:
    """Return the lines that follow Xid 79."""
    return [
        Line(WARNING, f"NVRM: GPU {pci(index)}: GPU has fallen off the bus."),
        Line(WARNING, f"NVRM: GPU {pci(index)}: GPU serial number is {serial(node, index)}."),
        recovery(index, 0, 2),
    ]


def recovery(index: int, old: int, new: int) -> Line:
    """Xid 154: the driver says what it wants done."""
    words = [f"0x{n:x} ({RECOVERY.get(n, 'Unknown')})" for n in (old, new)]
    return xid(index, 154, f"GPU recovery action changed from {words[0]} to {words[1]}")


def records(lines: Iterable[Line], first: int, at: int, step: int = 0) -> str:
    """Several lines: numbered from `first`, `step` microseconds apart."""
    return "".join(record(line, first + i, at + i * step) for i, line in enumerate(lines))
