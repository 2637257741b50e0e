"""The messages of NVIDIA's driver in the kernel's log. The lines are real ones, shortened."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.node.system import Event, LogRecord
from health.nvidia import xid, xid_lines
from health.nvidia.nvlink5 import read, read74

LINES = [
    (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
        ("xid", "0000:3b:00.0", 79, "GPU has fallen off the bus.", ""),
    ),
    (
        "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the"
        " bus.",
        ("xid", "0000:05:00.0", 79, "GPU has fallen off the bus.", ""),
    ),
    (
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        ("xid", "0000:01:00.0", 79, "GPU has fallen off the bus.", ""),
    ),
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", ("xid", "0000:03:00.0", 14, None, "")),
    ("NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d", ("xid", "0000:01:00.0", 13, None, "")),
    (
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: LTC TAG. RST: No",
        ("xid", "0000:01:00.0", 94, "Contained: LTC TAG. RST: No", "GPU-I:05"),
    ),
    (
        "NVRM: Xid (PCI:0000:C8:00 GPU-I:01 GPU-CI:00): 43, pid=9, name=a, b, Ch 00000008",
        ("xid", "0000:c8:00.0", 43, None, "GPU-I:01 GPU-CI:00"),
    ),
    (
        "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4"
        " (Drain and Reset)",
        ("xid", "0009:01:00.0", 154, None, ""),
    ),
    (
        "NVRM: Xid (PCI:10000:e1:00.0): 31, pid=5, name=x, Ch 1",
        ("xid", "10000:e1:00.0", 31, None, ""),
    ),
    ("NVRM: Xid (PCI:00000000:3B:00): 119", ("xid", "0000:3b:00.0", 119, "", "")),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted"
        " PRIV error (First)",
        ("sxid", "0000:c1:00.0", 12028, None, "nvswitch3"),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        ("sxid", "0000:00:00.0", 20034, "Fatal, Link 30 LTSSM Fault Up", "nvswitch0"),
    ),
    ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", ("lost", "0000:3b:00.0", 0, "bus", "")),
    ("NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.", ("lost", "0000:3b:00.0", 0, "bus", "")),
    ("NVRM: GPU at 0000:01:00.0 has fallen off the bus.", ("lost", "0000:01:00.0", 0, "bus", "")),
    (
        "NVRM: The NVIDIA GPU 0000:18:00.0\\x0aNVRM: (PCI ID: 10de:2901) installed in this system"
        " has\\x0aNVRM: fallen off the bus and is not responding to commands.",
        ("lost", "0000:18:00.0", 0, "bus", ""),
    ),
    (
        "NVRM: The NVIDIA GPU 0000:18:00.0\nNVRM: (PCI ID: 10de:2901) installed in this system"
        " has\nNVRM: fallen off the bus and is not responding to commands.",
        ("lost", "0000:18:00.0", 0, "bus", ""),
    ),
    (
        "NVRM: GPU 0000:00:06.0: RmInitAdapter failed! (0x11:0x45:2540)",
        ("lost", "0000:00:06.0", 0, "init", ""),
    ),
    (
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
        ("driver", "", 0, None, ""),
    ),
    ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  525.147.01", ("driver", "", 0, None, "")),
]
NOTHING = [
    "NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ kernel_gsp.c:1476",
    "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]",
    "NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7",
    "NVRM: A GPU crash dump has been created. If possible, please run nvidia-bug-report.sh",
    "NVRM: The NVIDIA GPU 0000:18:00.0\\x0aNVRM: (PCI ID: 10de:2901) installed in this system is"
    "\\x0aNVRM: not supported by the NVIDIA 580.95.05 driver release.",
    "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
    "NVRM: Xid : 32, pid=2280636",
    "NVRM: Xid (invalid): some error",
    "python[12]: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, said by a program",
    "nvidia-nvswitch0: open (major=510)",
    "nvidia 0000:3b:00.0: enabling device (0140 -> 0142)",
    "",
]


@pytest.mark.parametrize(("text", "expected"), LINES)
def test_a_line_is_read(text: str, expected: tuple[str, str, int, str | None, str]) -> None:
    line = xid_lines.parse(text)
    assert line is not None
    assert line[:3] == expected[:3]
    if expected[3] is not None:
        assert line.message == expected[3]
    assert line.unit == expected[4]


@pytest.mark.parametrize("text", NOTHING)
def test_other_lines_are_nothing(text: str) -> None:
    assert xid_lines.parse(text) is None


def test_the_three_lines_of_a_lost_gpu_may_come_apart() -> None:
    texts = [
        "NVRM: The NVIDIA GPU 0000:18:00.0",
        "NVRM: (PCI ID: 10de:2901) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    assert [e.data["gpu"] for e in events(*texts)] == ["0000:18:00.0"]
    assert not events(texts[0], texts[1], "NVRM: something else", texts[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", (0, 2)),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", (0, 2)),
        ("GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", (0, 1)),
        (
            "GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)",
            (4, 1),
        ),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", (1, 0)),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", (0, 3)),
        ("GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)", (0, 5)),
        ("GPU recovery action changed from 0x0 (None) to 0x7 (System Reboot)", (0, 7)),
        ("GPU recovery action changed from 0x0 (None) to 0x8 (New Thing)", (0, -1)),
        ("GPU recovery action changed from None to Node Reboot Required", (0, 2)),
        ("Xid 154 GPU recovery action changed from (None) to (Drain and Reset)", (0, 4)),
        ("GPU has fallen off the bus.", None),
        ("", None),
    ],
)
def test_the_recovery_action_is_read_by_its_number(
    text: str, expected: tuple[int, int] | None
) -> None:
    assert xid_lines.recovery(text) == expected


def test_45_names_its_cause() -> None:
    assert xid_lines.caused_by("Ch 00000010, errorString ... caused by previous Xid 31") == 31
    assert xid_lines.caused_by("Ch 00000010") == 0
    assert xid_lines.caused_by("caused by previous Xid x") == 0


# code, unit, severity, link; first and second word -> bits 20 to 25, has a rule, needs a reset
NVLINK5 = [
    (149, "NETIR_LINK_EVT", "Fatal", 1, "0x021425c6 0x00000000", 0x21, True, True),
    (149, "NETIR_LINK_EVT", "Fatal", 8, "0x004505c6 0x00000000", 4, True, True),
    (149, "NETIR_LINK_DOWN", "Fatal", 8, "0x02600011 0x00000000", 0x26, True, False),
    (149, "NETIR_BER_EVENT", "Nonfatal", 3, "0x00000226 0x00000001", 0, True, False),
    (149, "NETIR_MFDE_EVENT", "Fatal", -1, "0x00000246 0x00000004", 0, True, True),
    (149, "NETIR_LINK_EVT", "Fatal", 2, "0x03f005c6 0x00000000", 0x3F, False, True),
    (144, "SAW_MVB", "Nonfatal", -1, "0x00000021 0x00000001", 0, True, False),
    (144, "SAW_MVB", "Fatal", -1, "0x00000021 0x00000003", 0, True, True),
    (144, "SAW_MVB", "Nonfatal", -1, "0x00000021 0x00000400", 0, False, False),
    (145, "RLW_REMAP", "Nonfatal", 5, "0x00000004 0x00000001", 0, True, False),
    (145, "RLW_RXPIPE", "Nonfatal", 5, "0x00000006 0x00000001", 0, True, False),
    (145, "RLW_RXPIPE", "Fatal", 5, "0x00000086 0x00000001", 0, True, True),
    (145, "RLW_RXPIPE", "Nonfatal", 5, "0x000000c2 0x00000001", 0, True, False),
    (145, "RLW_RXPIPE", "Fatal", 5, "0x000004c2 0x00000001", 0, True, True),
    (146, "TLW_RX", "Fatal", 5, "0x00000143 0x00000004", 0, True, True),
    (150, "MSE_WATCHDOG", "Fatal", -1, "0x00000000 0x00000000", 0, True, True),
    (150, "MSE Degraded", "Fatal", -1, "0x00000000 0xFFFFFFFF", 0, True, True),
]


@pytest.mark.parametrize("row", NVLINK5)
def test_nvlink5_is_decoded(row: tuple[int, str, str, int, str, int, bool, bool]) -> None:
    code, unit, severity, link, words, detail, known, reset = row
    message = f"{unit}  {severity}   XC0 i0 Link {link:02d} ({words} 0x00000000 0x00000000)"
    for process in ("", "pid=7, name=x, "):
        line = xid_lines.parse(f"NVRM: Xid (PCI:0018:01:00): {code}, {process}{message}")
        assert line is not None
        found = read(code, line.message)
        assert found is not None
        assert (found.unit, found.fatal, found.link) == (unit, severity == "Fatal", link)
        assert (found.detail, found.known, found.reset) == (detail, known, reset)


@pytest.mark.parametrize(
    ("words", "reset"),
    [
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", True),
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", True),
        ("0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", False),
        ("0x800001, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", False),
        ("0x800003, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", True),
        ("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", True),
    ],
)
def test_the_registers_of_74_are_read(words: str, reset: bool) -> None:
    found = read74(f"NVLink: fatal error detected on link 14({words})")
    assert found is not None
    assert (found.link, found.reset) == (14, reset)
    assert read74("NVLink: fatal error detected on link 2") is None


@given(
    st.text()
    | st.text(alphabet="NVRM: Xid(PC0123456789abf,.GPUhasleotbu)\n").map("NVRM: Xid (".__add__)
)
def test_no_text_makes_it_fail(text: str) -> None:
    xid_lines.parse(text)
    xid_lines.recovery(text)
    xid_lines.caused_by(text)
    read74(text)
    for code in range(144, 151):
        read(code, text)
    records = [LogRecord(0, 1.0, 3, text)]
    found = xid.events_from_log(records, "b", 100.0, 50.0)
    assert xid.fresh(found, found) == []


BOOT, NOW, UPTIME = "b1", 10_000.0, 5_000.0


def events(*texts: str, times: tuple[float, ...] = ()) -> list[Event]:
    at = times or tuple(100.0 + n for n in range(len(texts)))
    log = [LogRecord(n, t, 3, text) for n, (t, text) in enumerate(zip(at, texts, strict=True))]
    return xid.events_from_log(log, BOOT, NOW, UPTIME)


XID_119 = "NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=nvidia-smi, Timeout after 6s of waiting"
LOADING = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"
XID_31 = "NVRM: Xid (PCI:0000:9b:00): 31, pid=8, name=python, Ch 00000008, intr 00000000"


def test_an_event_tells_when_where_and_what() -> None:
    (event,) = events(XID_119)
    assert (event.time, event.kind, event.boot) == (NOW - UPTIME + 100.0, "xid", BOOT)
    data = dict(event.data)
    assert data.pop("text") == XID_119
    assert data == {"gpu": "0000:9b:00.0", "code": 119, "at": 100.0, "last": 100.0, "count": 1}


def test_a_storm_is_one_event_until_it_is_silent() -> None:
    found = events(XID_119, XID_119, XID_31, XID_119, XID_119, times=(1, 100, 101, 270, 500))
    told = [(e.data["code"], e.data["at"], e.data["last"], e.data["count"]) for e in found]
    assert told == [(119, 1, 270, 3), (31, 101, 101, 1), (119, 500, 500, 1)]


def test_a_new_driver_ends_an_incident() -> None:
    assert [e.kind for e in events(XID_119, LOADING, XID_119)] == ["xid", "driver", "xid"]


def test_a_new_driver_is_an_event_each_time_and_parts_what_is_around_it() -> None:
    first = events(LOADING, XID_119, times=(10.0, 50.0))
    later = events(LOADING, XID_119, LOADING, XID_119, times=(10.0, 50.0, 100.0, 120.0))
    assert [e.data["at"] for e in xid.fresh([], later)] == [10.0, 50.0, 100.0, 120.0]
    assert [e.data["at"] for e in xid.fresh(first, later)] == [100.0, 120.0]
    assert xid.merge(first, later) == later
    assert xid.fresh(xid.merge(first, later), later) == []


def test_the_continuation_of_an_sxid_is_no_event_of_its_own() -> None:
    head = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, "
    texts = (
        "Fatal, Link 27 x",
        "Severity 1 Engine instance 27 Sub-engine instance 00",
        "Data {0x1}",
    )
    assert [e.data["count"] for e in events(*(head + text for text in texts))] == [1]


def test_reading_the_same_log_again_adds_nothing() -> None:
    first = events(XID_119, XID_31)
    stored = [Event(**json.loads(json.dumps(event._asdict()))) for event in first]
    later = xid.events_from_log(
        [LogRecord(0, 100.0, 3, XID_119), LogRecord(1, 101.0, 3, XID_31)],
        BOOT,
        NOW + 60.2,
        UPTIME + 60,
    )
    assert xid.fresh(stored, later) == []
    assert xid.merge(stored, later) == stored


def test_a_storm_whose_beginning_left_the_buffer_is_the_same_storm() -> None:
    stored = events(XID_119, times=(100.0,))
    rest = events(XID_119, XID_119, times=(150.0, 300.0))
    assert xid.fresh(stored, rest) == []
    (merged,) = xid.merge(stored, rest)
    assert (merged.data["at"], merged.data["last"], merged.data["count"]) == (100.0, 300.0, 2)


def test_the_same_message_after_a_boot_is_another_event() -> None:
    stored = [event._replace(boot="b0") for event in events(XID_119)]
    assert len(xid.merge(stored, events(XID_119))) == 2


def test_damaged_history_is_no_obstacle() -> None:
    bad = [
        Event(1.0, "xid", BOOT, {"gpu": 7, "code": "x", "at": None, "text": ["a"], "last": True}),
        Event(2.0, "lost", "", {"cut": 9000}),
        Event(3.0, "xid", BOOT, {"code": float("nan"), "at": float("inf")}),
    ]
    assert len(xid.merge(bad, events(XID_119))) == 4


@given(
    st.lists(
        st.tuples(st.sampled_from([XID_119, XID_31, LOADING]), st.integers(0, 2000)),
        max_size=12,
        unique_by=lambda entry: entry[1],
    ),
    st.integers(0, 12),
)
def test_any_part_of_a_log_read_first_changes_nothing(
    entries: list[tuple[str, int]], split: int
) -> None:
    entries.sort(key=lambda item: item[1])
    log = [LogRecord(n, float(t), 3, text) for n, (text, t) in enumerate(entries)]
    whole = xid.events_from_log(log, BOOT, NOW, UPTIME)
    early = xid.events_from_log(log[:split], BOOT, NOW, UPTIME)
    stored = xid.merge([], early)
    both = xid.merge(stored, whole)

    def told(found: list[Event]) -> list[tuple[object, ...]]:
        return sorted(
            (e.data["code"], e.data["at"], e.data["last"], e.data["count"]) for e in found
        )

    assert told(both) == told(whole)
    stored += xid.fresh(stored, whole)
    assert xid.fresh(stored, whole) == []
