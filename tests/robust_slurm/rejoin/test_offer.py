"""A rank's line to robust-task, in the rank itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from waiting import until

from robust_slurm.rejoin.offer import PAUSE, Interrupted, RejoinOffer

LONG = 30.0  # s; a bound that no passing test comes near


def test_nothing_is_computed_with_what_an_abort_returns(tmp_path: Path) -> None:
    """NCCL's collectives return as if they had succeeded: the program must be out before."""
    left: list[bool] = []
    # The abort takes until the program is out.
    offer = RejoinOffer(
        str(tmp_path / "line"), lambda: left.append(offer._out.wait(LONG)), lambda: True
    )
    with socket.socket(socket.AF_UNIX) as robust_task:
        robust_task.connect(str(tmp_path / "line"))
        with pytest.raises(Interrupted):
            robust_task.sendall(PAUSE)
            until(lambda: left, "the end of the abort", LONG, every=0.001)
        assert offer.end()
    assert left[0]
