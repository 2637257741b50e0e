"""Labs for the cluster tests: one per module for tests that break no node, else one per test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from lab_nodes import leave_idle

from lab import Cluster, LabError, host

HERE = Path(__file__).parent


def no_lab_here() -> str:
    """Return the reason why no lab can run on this machine; empty if one can."""
    try:
        host.check_host()
    except LabError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = no_lab_here()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


class LabFactory(Protocol):
    def __call__(
        self, nodes: int = 3, standby: int = 1, gpus: int = 0, **slurm_conf: str | int
    ) -> Cluster: ...


@pytest.fixture
def new_lab() -> Iterator[LabFactory]:
    """Brings up labs of the test's own, gone at its end: for tests that break nodes."""
    with contextlib.ExitStack() as stack:

        def make(
            nodes: int = 3, standby: int = 1, gpus: int = 0, **slurm_conf: str | int
        ) -> Cluster:
            cluster = Cluster(nodes=nodes, standby=standby, gpus=gpus, slurm_conf=slurm_conf)
            return stack.enter_context(cluster)

        yield make


@pytest.fixture(scope="module")
def module_lab() -> Iterator[Cluster]:
    with Cluster(nodes=4, standby=1) as cluster:
        yield cluster


@pytest.fixture
def lab(module_lab: Cluster) -> Iterator[Cluster]:
    """The module's lab, without jobs: for tests that leave all nodes in order."""
    yield module_lab
    leave_idle(module_lab)


@pytest.fixture(scope="module")
def module_gpu_lab() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0, gpus=8, scratch=True) as cluster:
        yield cluster


@pytest.fixture
def gpu_lab(module_gpu_lab: Cluster) -> Iterator[Cluster]:
    """The module's lab with GPUs and a scratch mount; what a test breaks is mended after it."""
    yield module_gpu_lab
    for node, fault in module_gpu_lab.faults().items():
        if fault != "up":
            module_gpu_lab.heal(node)
