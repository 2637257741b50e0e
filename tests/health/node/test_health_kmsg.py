"""The kernel's log: the format of /dev/kmsg, and how it is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.node import kmsg
from health.node.system import LogRecord


@pytest.mark.parametrize(
    ("line", "record"),
    [
        ("6,1234,5678901,-;hello; world", LogRecord(1234, 5.678901, 6, "hello; world")),
        ("3,0,0,-,caller=T12;NVRM: Xid", LogRecord(0, 0.0, 3, "NVRM: Xid")),
        ("4,7,1000000,c;part", LogRecord(7, 1.0, 4, "part")),
        ("6,1,1,-;", LogRecord(1, 1e-6, 6, "")),
        # Facility 1 and up: a program wrote it into /dev/kmsg.
        ("12,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, forged", None),
        ("30,1,1,-;systemd[1]: hello", None),
        ("6,1,-;text", None),
        ("6,1,1,-", None),
        ("x,1,1,-;text", None),
        ("-1,1,1,-;text", None),
        ("6,-1,1,-;text", None),
        ("", None),
    ],
)
def test_one_line(line: str, record: LogRecord | None) -> None:
    assert kmsg.parse_line(line) == record


def test_lines_that_begin_with_a_blank_are_left_out() -> None:
    text = "6,1,1000000,-;one\n SUBSYSTEM=pci\n\tDEVICE=+pci:0000:3b:00.0\n4,2,2000000,-;two\n"
    assert [record.text for record in kmsg.parse(text)] == ["one", "two"]


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    for record in kmsg.parse(text):
        assert 0 <= record.level < 8


@given(
    st.builds(
        LogRecord,
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 44).map(lambda usec: usec / 1e6),
        st.integers(0, 7),
        st.text(st.characters(exclude_characters="\n")),
        st.integers(0, 1 << 40),
    )
)
def test_a_record_comes_back_from_its_line(record: LogRecord) -> None:
    assert kmsg.parse_line(kmsg.format_record(record)) == record


def test_a_plain_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("".join(f"6,{n},{n},-;line {n}\n" for n in range(50_000)))
    records = kmsg.read(str(path))
    assert len(records) == 50_000 and records[-1].text == "line 49999"


def test_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"6,1,1,-;a\xffb\n")
    assert kmsg.read(str(path))[0].text == "a\ufffdb"


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        kmsg.read(str(tmp_path / "kmsg"))


class _Device:
    """The answers of /dev/kmsg to one read after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[bytes | int]):
        self.answers = answers
        monkeypatch.setattr(os, "read", self.read)

    def read(self, fd: int, size: int) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


def test_the_device_is_read_record_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(
        monkeypatch,
        [b"6,1,1,-;one\n", errno.EPIPE, b"6,9,9,-;nine\n A=b\n", errno.EAGAIN, b"6,10,10,-;no\n"],
    )
    assert [r.text for r in kmsg.read("/dev/zero")] == ["one", "nine"]
    assert device.answers == [b"6,10,10,-;no\n"]


def test_records_that_were_overwritten_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap in the numbers shows the loss; a record of a program between two is no loss."""
    answers: list[bytes | int] = [
        b"6,100,1,-;the oldest there is\n",
        b"12,101,2,-;a program's\n",
        b"6,102,3,-;kernel\n",
        errno.EPIPE,
        b"12,140,4,-;a program's\n",
        b"4,142,5,-,caller=T1;kernel\n A=b\n",
        errno.EAGAIN,
    ]
    _Device(monkeypatch, answers)
    assert [(r.seq, r.lost) for r in kmsg.read("/dev/zero")] == [(100, 0), (102, 0), (142, 38)]


def test_a_recorded_loss_is_replayed(tmp_path: Path) -> None:
    record = LogRecord(142, 5.0, 4, "text; more", lost=38)
    assert kmsg.parse_line(kmsg.format_record(record)) == record
    path = tmp_path / "kmsg"  # a recorded log: the numbers of programs' records are not in it
    path.write_text("6,1,1,-;one\n6,9,9,-;nine\n6,10,10,-,lost=99999999999999999999;ten\n")
    assert [r.lost for r in kmsg.read(str(path))] == [0, 0, 0]


def test_an_error_of_the_device_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    _Device(monkeypatch, [errno.EIO])
    with pytest.raises(OSError, match="Input/output"):
        kmsg.read("/dev/zero")


@pytest.mark.skipif(not os.access(kmsg.DEVICE, os.R_OK), reason="the kernel's log is closed")
def test_the_log_of_this_machine_can_be_read() -> None:
    try:
        records = kmsg.read()
    except PermissionError:
        pytest.skip("the kernel's log is closed")
    assert [r.seq for r in records] == sorted(r.seq for r in records)
