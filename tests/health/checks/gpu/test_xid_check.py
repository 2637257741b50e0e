"""The family xid on a whole node."""

from __future__ import annotations

from typing import Any

import pytest
from fake_system import NOW, UPTIME, FakeSystem, log

from health.checks.gpu import xid
from health.finding import Finding
from health.node.gpu_snapshot import GpuSnapshot
from health.node.system import Event, LogRecord

GPUS = ["0000:1b:00.0", "0000:3b:00.0"]
SNAPSHOT: GpuSnapshot = {
    "stage": "done",
    "driver": "580.95.05",
    "count": 2,
    "devices": [{"index": n, "pci": pci} for n, pci in enumerate(GPUS)],
    "lost": [],
}
LOADING = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
HEALTHY = [
    "Linux version 6.8.0-60-generic (buildd@lcy02-amd64-054)",
    "Command line: BOOT_IMAGE=/vmlinuz-6.8.0-60-generic root=/dev/mapper/vg-root ro quiet",
    "nvidia: loading out-of-tree module taints kernel.",
    "nvidia-nvlink: Nvlink Core is being initialized, major device number 509",
    "nvidia 0000:3b:00.0: enabling device (0140 -> 0142)",
    LOADING,
    "nvidia-modeset: Loading NVIDIA UNIX Open Kernel Mode Setting Driver for x86_64  580.95.05",
    "nvidia-nvswitch0: open (major=510)",
    "[drm] [nvidia-drm] [GPU ID 0x00003b00] Loading driver",
    "NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ kernel_gsp.c:1476",
    "NVRM: Persistence mode is deprecated and will be removed in a future release.",
    "switch: port 3(p2b1) entered disabled state",
    "python[2280]: segfault at 0 ip 00007f2d sp 00007ffc error 4 in libc.so.6",
]


def run(system: FakeSystem) -> list[Finding]:
    return xid.CHECK.run(system)


def told(findings: list[Finding]) -> list[tuple[str, str, str, str, str]]:
    return [(f.status, f.cls, f.check, f.device, f.action) for f in findings]


def line(code: int, message: str, pci: str = "0000:3b:00", process: str = "") -> str:
    return f"NVRM: Xid (PCI:{pci}): {code}, {process}{message}"


def test_a_healthy_node_says_nothing_and_asks_nothing_more() -> None:
    system = FakeSystem(kmsg=log(*HEALTHY), snapshot=SNAPSHOT)
    assert run(system) == []
    assert system.asked["nvml"] == 0


FALLEN = "GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line(79, FALLEN)], [("FAIL", "node", "xid-79", "gpu1", "reboot")]),
        ([line(79, FALLEN, "0000:99:00")], [("FAIL", "node", "xid-79", "0000:99:00.0", "reboot")]),
        (
            ["NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."],
            [("FAIL", "node", "gpu-fell-off-bus", "gpu0", "reboot")],
        ),
        ([line(119, "Timeout"), LOADING], []),
        (
            ["nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22003, Fatal, Link 27 x"],
            [("FAIL", "node", "sxid-always-fatal", "nvswitch3", "reboot")],
        ),
        ([line(13, "Graphics Exception")], [("WARN", "user", "xid-app", "gpu1", "none")]),
        ([line(45, "Ch 00000010")], [("WARN", "node", "xid-45", "gpu1", "restart-fabric-manager")]),
        ([line(94, "Contained")], [("WARN", "node", "xid-94", "gpu1", "none")]),
        ([line(9000, "?")], [("WARN", "node", "xid-unlisted", "gpu1", "none")]),
        ([line(63, "Row Remapper: New row marked for remapping")], []),
        (
            [line(63, f"Row Remapper: 0x{n}") for n in range(4)],
            [("WARN", "node", "xid-wear", "gpu1", "none")],
        ),
    ],
)
def test_findings(lines: list[str], expected: list[tuple[str, ...]]) -> None:
    system = FakeSystem(kmsg=log(*lines, time=UPTIME - 300), snapshot=SNAPSHOT)
    assert told(run(system)) == expected


def test_the_evidence_says_what_when_and_why() -> None:
    lines = [
        line(79, FALLEN, process="pid=1234, name=python, "),
        line(154, "GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)"),
    ]
    (found,) = run(FakeSystem(kmsg=log(*lines, time=UPTIME - 400), snapshot=SNAPSHOT))
    assert found.action == "reset-gpu"
    assert found.evidence == (
        "Xid 79 (GPU has fallen off the bus), 1 x, last 7 min ago; by the driver (Xid 154: 1);"
        ' "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."'
    )
    assert "\n" not in found.evidence


def test_what_programs_did_is_told_for_an_hour_only() -> None:
    old, new = line(13, "Graphics Exception"), line(31, "Ch 8")
    kmsg = [LogRecord(0, UPTIME - 4000, 3, old), LogRecord(1, UPTIME - 60, 3, new)]
    (found,) = run(FakeSystem(kmsg=kmsg, snapshot=SNAPSHOT))
    assert "Xid 31" in found.evidence and "13" not in found.evidence
    assert run(FakeSystem(kmsg=kmsg[:1], snapshot=SNAPSHOT)) == []


def test_nvml_says_that_nothing_is_needed_any_more() -> None:
    devices: list[Any] = [{"index": 1, "pci": GPUS[1], "recovery_action": 0}]
    snapshot: GpuSnapshot = {**SNAPSHOT, "devices": devices}
    lines = [
        line(95, "Uncontained"),
        line(154, "GPU recovery action changed from 0x0 (None) to 0x1 (x)"),
    ]
    system = FakeSystem(kmsg=log(*lines, time=UPTIME - 300), snapshot=snapshot)
    assert run(system) == []
    hung: GpuSnapshot = {"stage": "init", "hung": True, "devices": []}
    (found,) = run(FakeSystem(kmsg=log(*lines, time=UPTIME - 300), snapshot=hung))
    assert (found.check, found.device) == ("xid-95", GPUS[1])


def test_a_fault_that_left_the_log_is_still_in_the_history() -> None:
    system = FakeSystem(kmsg=log(line(119, "Timeout"), time=UPTIME - 5000), snapshot=SNAPSHOT)
    stored = xid.events(system)
    later = FakeSystem(history=stored, snapshot=SNAPSHOT)
    assert told(run(later)) == [("FAIL", "node", "xid-119", "gpu1", "reset-gpu")]
    assert xid.events(FakeSystem(kmsg=system.kmsg, history=stored)) == []
    rebooted = FakeSystem(history=stored, snapshot=SNAPSHOT, boot="another", uptime=60.0)
    assert run(rebooted) == []


def test_the_site_and_its_settings() -> None:
    options = {"xid": {"overrides": {"79": "service", "13": "reset-gpu", "x": "reboot", "1": "no"}}}
    lines = [line(79, FALLEN), line(13, "Graphics Exception", "0000:1b:00")]
    system = FakeSystem(kmsg=log(*lines, time=UPTIME - 300), snapshot=SNAPSHOT, options=options)
    assert told(run(system)) == [
        ("FAIL", "node", "xid-79", "gpu1", "service"),
        ("FAIL", "node", "xid-13", "gpu0", "reset-gpu"),
    ]


def test_too_many_reboots_for_a_cause() -> None:
    day = 86400.0
    history = [Event(NOW - n * day, "drain", f"b{n}", {"action": "reboot"}) for n in (3, 2, 1.5)]
    (found,) = run(FakeSystem(history=history, snapshot=SNAPSHOT))
    assert (found.check, found.action) == ("reboots-for-cause", "service")


def test_a_storm_is_read_quickly_and_is_one_finding() -> None:
    storm = [LogRecord(n, 100 + n / 1000, 3, line(119, "Timeout")) for n in range(20_000)]
    (found,) = run(FakeSystem(kmsg=storm, snapshot=SNAPSHOT))
    assert "20000 x" in found.evidence
    assert len(xid.events(FakeSystem(kmsg=storm))) == 1


OLDER = {"errors": {"remap": "NVML_ERROR_NOT_SUPPORTED"}, "retired": {"single": 0, "double": 1}}
PAGE = "Dynamic Page Retirement: Fatal error, unable to retire page (0x00000000001a2b3c)"


def test_a_gpu_that_retires_pages_is_told_so() -> None:
    """The catalogue covers Ampere and later; on Volta and Turing 63 and 64 are about pages."""
    devices: list[Any] = [{"index": n, "pci": pci} | OLDER for n, pci in enumerate(GPUS)]
    snapshot: GpuSnapshot = {**SNAPSHOT, "driver": "535.183.06", "devices": devices}
    (found,) = run(FakeSystem(kmsg=log(line(64, PAGE), time=UPTIME - 300), snapshot=snapshot))
    assert (found.check, found.action) == ("xid-64", "reset-gpu")
    assert "Xid 64 (memory page could not be retired), 1 x" in found.evidence
    assert "covers Ampere and later only" in found.evidence
    (found,) = run(FakeSystem(kmsg=log(line(79, FALLEN), time=UPTIME - 300), snapshot=snapshot))
    assert "covers Ampere and later only" in found.evidence
    (found,) = run(FakeSystem(kmsg=log(line(64, "x"), time=UPTIME - 300), snapshot=SNAPSHOT))
    assert "Xid 64 (memory row could not be remapped)" in found.evidence
    assert "Ampere" not in found.evidence
