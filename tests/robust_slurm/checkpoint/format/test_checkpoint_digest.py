"""Digests and the token bucket."""

from __future__ import annotations

import os
import runpy
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint.format import crc, digest
from robust_slurm.checkpoint.transfer.throttle import Bucket

C = digest.CHUNK


def _fd(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("size", [1, 7, C - 1, C, C + 1, 2 * C + 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_crc_for_each_chunk(tmp_path: Path, size: int, threads: int) -> None:
    data = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    fd = _fd(tmp_path / "f", data[:size])
    expected = [zlib.crc32(data[:size][at : at + C]) for at in range(0, size, C)]
    assert digest.take(fd, size, threads) == expected
    os.close(fd)


def test_isal_sums_up_where_it_is() -> None:
    isal = pytest.importorskip("isal.isal_zlib")
    assert crc.crc32 is isal.crc32


@given(st.binary(max_size=100_000), st.integers(0, 2**32 - 1))
def test_whoever_sums_up_gives_the_same(data: bytes, start: int) -> None:
    assert crc.crc32(data) == zlib.crc32(data)
    assert crc.crc32(memoryview(data), start) == zlib.crc32(data, start)


def test_where_isal_is_not_zlib_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert runpy.run_path(str(crc.__file__))["crc32"] is zlib.crc32


@pytest.mark.parametrize(
    ("flipped", "chunks"), [((0,), [0]), ((C - 1, C), [0, 1]), ((2 * C + 4,), [2])]
)
def test_flipped_bits_are_found_in_their_chunk(
    tmp_path: Path, flipped: tuple[int, ...], chunks: list[int]
) -> None:
    size = 2 * C + 5
    fd = _fd(tmp_path / "f", bytes(size))
    good = digest.take(fd, size)
    with (tmp_path / "f").open("r+b") as file:
        for at in flipped:
            file.seek(at)
            file.write(b"\x10")
    assert digest.differing(fd, size, good, threads=2) == chunks
    assert digest.differing(fd, size, good, among=[1]) == [c for c in chunks if c == 1]
    os.close(fd)


def test_a_file_that_is_cut_short_is_an_error_and_no_signal(tmp_path: Path) -> None:
    fd = _fd(tmp_path / "f", bytes(100))
    with pytest.raises(digest.FileChangedError, match="ends at byte 100 of 200"):
        digest.take(fd, 200)
    os.close(fd)


def test_what_differs_is_named() -> None:
    assert "chunk 1 (bytes 16777216 to 16777225) differs" in digest.describe([1], C + 10)
    assert "and 2 more" in digest.describe([0, 1, 2], 3 * C)


@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=50), st.floats(1e5, 1e9))
def test_the_bucket_never_lets_more_through_than_its_rate(sizes: list[int], rate: float) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    for size in sizes:
        now += bucket.take(size, now)
    assert now >= (sum(sizes) - rate / 10) / rate - 1e-6


def test_the_bucket_does_not_save_up_for_more_than_a_tenth_of_a_second() -> None:
    bucket = Bucket(1000.0, 0.0)
    assert bucket.take(100, 50.0) == 0.0
    assert bucket.take(100, 50.0) == pytest.approx(0.1)


def test_no_rate_is_no_limit() -> None:
    bucket = Bucket(0.0, 0.0)
    assert bucket.piece == 0
    assert bucket.take(1 << 40, 0.0) == 0.0
