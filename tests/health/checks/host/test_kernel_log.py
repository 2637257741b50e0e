"""Disks, links and hangs in the kernel's log."""

from __future__ import annotations

from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from fake_system import UPTIME, FakeSystem, log
from kernel_lines import (
    CGROUP,
    DOWN,
    IO,
    LINK,
    MEDIUM,
    OLD_IO,
    OLD_RESET,
    OOM,
    RCU,
    RESET,
    SOFT,
    run,
    told,
)

from health.checks.host import kernel_log
from health.node.kernlog import quoted
from health.node.system import LogRecord


def kernel(*lines: str, ago: float = 600.0, level: int = 3, **options: Any) -> FakeSystem:
    """A node up for a day, with these messages ``ago`` seconds before now."""
    kmsg = log(*lines, level=level, time=UPTIME - ago)
    return FakeSystem({NVME0: "pcie\n"}, kmsg=kmsg, options={"kernel_log": options})


NVME0 = "/sys/class/nvme/nvme0/transport"


@pytest.mark.parametrize("rule", kernel_log.RULES, ids=lambda rule: str(rule.one.check))
def test_no_name_of_a_process_is_as_long_as_a_message(rule: kernel_log.LogRule) -> None:
    """Some messages begin with a process's name: 15 characters that its user chooses."""
    shortest, _ = _parser.parse(rule.pattern).getwidth()
    assert shortest > 15


def test_a_process_can_call_itself_like_an_oops() -> None:
    line = "Oops: 0[#1] SMP invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0"
    assert run(kernel_log, kernel(line, level=4)) == []


@pytest.mark.parametrize("files", [{NVME0: "tcp\n"}, {}])
def test_a_storage_server_that_is_away_is_not_this_nodes_trouble(files: dict[str, str]) -> None:
    """All its clients were drained until their next boot; without a path for long it is removed."""
    lost = "block nvme0n1: no available path - failing I/O"
    late = "nvme nvme0: Device not ready; aborting reset, CSTS=0x1"
    system = FakeSystem(files, kmsg=log(lost, late, level=3, time=UPTIME - 600.0))
    assert run(kernel_log, system) == []


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
    assert quoted("a" * 1000) == '"' + "a" * 239 + '…"'


@pytest.mark.parametrize(
    ("seq", "age", "lost", "options", "said"),
    [
        (0, 60.0, 0, {}, ""),  # a young node whose log begins with its boot
        (90_000, 86_000.0, 0, {}, ""),  # the boot's messages are gone, as on any old node
        (90_000, 60.0, 0, {}, "reaches back 60 s only, expected 5 min, 90000 records"),
        (90_000, 60.0, 0, {"reach": 0.0}, ""),
        (90_000, 86_000.0, 1, {}, "1 record overwritten while"),
        (0, 60.0, 38, {"reach": 0.0}, "38 records overwritten while"),
    ],
)
def test_a_log_that_was_overrun(
    seq: int, age: float, lost: int, options: dict[str, Any], said: str
) -> None:
    first = LogRecord(seq, UPTIME - age, 6, "pci: hello")
    last = LogRecord(seq + 1 + lost, UPTIME - 1, 6, "pci: bye", lost)
    found = run(kernel_log, FakeSystem(kmsg=[first, last], options={"kernel_log": options}))
    assert told(found) == ([("log-overrun", "")] if said else [])
    assert said in "".join(f.evidence for f in found)
