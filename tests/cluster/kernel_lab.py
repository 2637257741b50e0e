"""A lab whose nodes have kernels of their own, with real cgroups: few tests are worth the wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from lab import Cluster
from lab.kernel import uml
from lab.slurm import releases


def need_kernels(release: str) -> None:
    """Skip the test where no node can have a kernel of its own, or the release is not to be had."""
    if not os.environ.get("ROBUST_TEST_KERNELS"):
        pytest.skip("each takes a minute and user-mode Linux; run make test-kernel")
    if why := uml.why_not() or releases.why_not(release):
        pytest.skip(why)


@contextlib.contextmanager
def kernel_lab(release: str, nodes: int) -> Iterator[Cluster]:
    need_kernels(release)
    with Cluster(nodes=nodes, standby=0, kernel=True, slurm=release) as lab:
        yield lab
