"""Memory made ready in tests: small pieces, and what lies in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import until

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store import reserve
from robust_slurm.checkpoint.store.reserve import Reserve

PIECE = 1 << 16


def use_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_PIECE", PIECE)
    monkeypatch.setattr(digest, "CHUNK", 1 << 18)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob(".room-*"))


def prepared(room: Reserve, size: int, count: int) -> None:
    """Make so many files of ``size`` bytes, and wait for them."""
    room.prepare(size, count)
    until(lambda: room.sizes == [size] * count, f"{count} files of {size} bytes")
