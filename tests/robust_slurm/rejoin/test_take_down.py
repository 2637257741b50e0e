"""Process groups that were aborted; torch.distributed is a stub."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest

from robust_slurm.rejoin import collectives


class Group:
    pass


@pytest.mark.parametrize(
    ("backend", "by_itself", "stays"),
    [("nccl", False, True), ("nccl", True, True), ("gloo", False, False)],
)
def test_an_aborted_nccl_group_never_ends(
    monkeypatch: pytest.MonkeyPatch, backend: str, by_itself: bool, stays: bool
) -> None:
    """The group's destructor would wait for torch's watchdog, for ever at times. ``by_itself``:
    after the abort the training's function takes it down, in a finally clause."""
    group = Group()
    world = types.SimpleNamespace(
        pg_map={group: (backend, None)}, pg_names={group: "0"}, pg_backend_config={}
    )
    c10d = types.ModuleType(collectives._C10D)
    c10d._world, c10d._abort_process_group = world, world.pg_map.clear  # type: ignore[attr-defined]
    distributed = types.ModuleType("torch.distributed")
    distributed.is_available = distributed.is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setitem(sys.modules, collectives._C10D, c10d)
    alive = weakref.ref(group)
    monkeypatch.setattr(collectives.teardown, "abort", lambda _c10d: None)
    assert collectives.abort_nccl() is (backend == "nccl")
    if by_itself:
        c10d._abort_process_group()
    collectives.take_down()
    assert not world.pg_map
    world.pg_names.clear()
    del group
    gc.collect()
    assert (alive() is not None) is stays
