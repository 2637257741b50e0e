"""bench.pool_sizes: ByteRobust's table 5, and ours beside it."""

from __future__ import annotations

import pytest

from bench import pool_sizes


def test_our_sizes_are_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = pool_sizes.rows()
    assert [row.standbys[0] for row in rows] == [2, 2, 3, 4, 7]
    assert not rows[0]._replace(standbys=(3, 2, 3, 4)).agrees
    assert pool_sizes.main() == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "1024 256B, TP 8, DP 128, PP 16 4 4 7 9 13" in printed
    assert "2048 7 11 15 22" in printed
