"""Requests: what robust-update appends, and what robust-srun reads of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srun_wrapper.code.requests import Request, read_from, send
from srun_wrapper.code.versions import Change


def request(number: int) -> Request:
    return Request("change", Change(str(number), "now", f"c-{number}", "u", "h", "", 1.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "updates.jsonl"
    made.touch()
    return made


def test_each_request_is_read_once(path: Path) -> None:
    assert read_from(path, 0) == ([], 0)
    send(path, request(1))
    send(path, request(2))
    found, offset = read_from(path, 0)
    assert [one for one, _ in found] == [request(1), request(2)]
    assert read_from(path, offset) == ([], offset)
    assert read_from(path, found[0][1]) == (found[1:], offset), "from after the first one on"
    send(path, request(3))
    assert [one for one, _ in read_from(path, offset)[0]] == [request(3)]


def test_half_a_line_waits_and_nonsense_is_skipped(path: Path) -> None:
    path.write_bytes(b'{"action": "bad"}\nnonsense\n{"action": "\xff"}\n{"act')
    found, offset = read_from(path, 0)
    assert found == [] and offset == path.stat().st_size - 5
    send(path, request(1))
    assert [one for one, _ in read_from(path, offset)[0]] == [request(1)]


def test_only_the_jobs_user_is_heard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(path, request(1))
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="not this user's own"):
        read_from(path, 0)
    with pytest.raises(PermissionError, match="another user's"):
        send(path, request(2))


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        read_from(tmp_path / "link", 0)
