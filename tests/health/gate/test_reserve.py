"""The fleet's ledger of drains when it is long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from health.gate import reserve as ledger
from health.gate.breaker import Drain, DrainLimits, allowed_for_user
from health.node import rootfiles

NOW = 2e9
LIMITS = DrainLimits(max_nodes=5, max_percent=100.0, window=3600.0, max_per_job=9)
OWN = Drain(NOW, "n1", 0, "network")
DAYS = [NOW - 10 * 86_400 + number for number in range(3000)]  # 200 KB of records


def asked(top: Path, times: list[float], most: int = 5) -> str:
    """Reserve a drain when there were these, each of another node; the breaker's words."""
    (top / "nodes").mkdir()
    lines = [
        rootfiles.line_of(Drain(time, f"n{number + 2}", 0, "network")._asdict())
        for number, time in enumerate(times)
    ]
    path = top / "nodes" / "drains.jsonl"
    path.write_bytes(b"".join(lines))
    path.chmod(0o600)
    found = ledger.reserve(str(top), OWN, LIMITS._replace(max_nodes=most), 10_000)
    written = path.read_bytes().splitlines()[len(lines) :]
    assert len(written) == 1 and (b"refused" in written[0]) is not found.allowed
    return found.why


@pytest.mark.parametrize(
    ("times", "most", "bound"),
    [
        pytest.param([], 5, "", id="empty"),
        pytest.param([NOW] * 4, 5, "", id="below"),
        pytest.param([NOW] * 5, 5, "5 other nodes", id="at the limit"),
        pytest.param(DAYS, 5, "", id="all long over"),
        pytest.param([*DAYS, *[NOW - 3000] * 5], 5, "5 other nodes", id="after old ones"),
        # All of the window counts, however much it is.
        pytest.param([NOW - 3000] * 3000, 2999, "3000 other nodes", id="more than the end holds"),
        pytest.param([NOW - 3000] * 3000, 3001, "", id="below a wide limit"),
        # Records that a wrong clock has written do not hide what is before them.
        pytest.param(
            [5.0 if number % 16 else NOW - 9 for number in range(4000)],
            250,
            "250 other nodes",
            id="wrong clocks",
        ),
        pytest.param([NOW + 3660] * 5, 5, "5 other nodes", id="the clock was set back an hour"),
        pytest.param([NOW + 9e8] * 5, 5, "5 other nodes", id="and by 28 years"),
        # Records of a sane clock that follow date those of a wrong one.
        pytest.param([*[NOW + 9e8] * 5, NOW - 3700], 5, "", id="28 years ahead, long ago"),
    ],
)
def test_limits_hold_for_a_ledger_of_any_length(
    tmp_path: Path, times: list[float], most: int, bound: str
) -> None:
    why = asked(tmp_path, times, most)
    assert why.startswith(bound) if bound else not why


def test_of_a_long_ledger_only_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, most: int, at: int) -> bytes:
        read.append(most)
        return pread(fd, most, at)

    monkeypatch.setattr(os, "pread", counted)
    assert asked(tmp_path, DAYS) == ""
    assert sum(read) < 2 * ledger.NEWEST


@pytest.mark.parametrize(
    ("uids", "own", "allowed"),
    [
        ([33001], 33001, True),
        ([33001, 33001], 33001, False),
        ([33001, 33001], 33002, True),  # another user is not to suffer for it
        ([-1, -1], -1, True),  # two nodes of nobody known must not bind the fleet
    ],
)
def test_what_one_user_left_drains_few_nodes(
    tmp_path: Path, uids: list[int], own: int, allowed: bool
) -> None:
    """A sweep knows no job, and a user can have any number of them."""
    (tmp_path / "nodes").mkdir()
    limits = LIMITS._replace(max_per_job=2)
    for number, uid in enumerate(uids):
        one = Drain(NOW - 60, f"n{number + 2}", number, "user", uid)
        assert ledger.reserve(str(tmp_path), one, limits, 10_000).allowed
    asked = ledger.reserve(str(tmp_path), Drain(NOW, "n1", 0, "user", own), limits, 10_000)
    assert asked.allowed is allowed
    assert allowed or "2 other nodes were drained for what" in asked.why


@pytest.mark.parametrize(("standing", "allowed"), [({"n2", "n3"}, False), ({"n2"}, True)])
def test_what_one_user_left_counts_as_long_as_it_stands(standing: set[str], allowed: bool) -> None:
    old = [Drain(NOW - 80_000, node, 0, "user", 33001) for node in ("n2", "n3")]
    own = Drain(NOW, "n1", 0, "user", 33001)
    limits = LIMITS._replace(max_per_job=2)
    assert allowed_for_user(old, standing, NOW, limits, own).allowed is allowed
    assert allowed_for_user(old, standing, NOW, limits, own._replace(cause="disk")).allowed


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "-1" + "0" * 400, "1e400", "NaN", "true"])
@pytest.mark.parametrize("key", ["time", "job"])
def test_a_number_made_to_hurt_is_no_drain(digits: str, key: str) -> None:
    """OverflowError ended the breaker, and with it each gate that asked it."""
    line = '{"time":1,"node":"n2","job":0}'.replace(f'"{key}":', f'"{key}":{digits},"x":')
    good = rootfiles.line_of(OWN._asdict())
    assert ledger.parse(rootfiles.records(line.encode() + b"\n" + good)) == [OWN]
