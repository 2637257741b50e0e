"""After which errors a rank waits for an order, before it raises them."""

from __future__ import annotations

import pytest

from robust_slurm.rejoin.collectives import by_peers


class DistBackendError(RuntimeError):
    """Stand for torch's, by its name."""


class OwnError(RuntimeError):
    """A program's."""


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]"), True),
        (RuntimeError("Socket closed"), True),
        (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"), True),
        (ConnectionResetError("Connection reset by peer"), False),  # of the program's own network
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (OwnError("gloo"), False),
        (ValueError("NCCL"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_it_may_come_from_a_peer(error: BaseException, waits: bool) -> None:
    assert by_peers(error) is waits
