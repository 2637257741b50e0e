"""All ranks have the same plan at the first start, or the user is told what differs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from memory_source import corpus

from robust_slurm.data import Loader, agreement
from robust_slurm.data.agreement import agree
from robust_slurm.data.errors import DataError
from robust_slurm.data.plan import Plan

torch = pytest.importorskip("torch")


def test_ranks_compare_their_plans_at_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(agreement, "_store", lambda: store)
    (tmp_path / "agreed_plan.py").write_text(
        "from memory_source import corpus\n"
        "from robust_slurm.data.plan import Plan\n"
        "plan = Plan({'web': corpus('web', 1)}, pack=64)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def be(rank: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(agreement, "_compared", {})

    be(0)
    loader = Loader("agreed_plan:plan")
    next(loader)
    state, first = loader.state_dict(), agreement._compared
    plan = Plan({"web": corpus("web", 1)}, pack=64)
    be(1)
    agree("agreed_plan:plan", "1/1", plan.identity)
    be(3)
    other = Plan({"web": corpus("web", 1)}, pack=64, batch=2)
    with pytest.raises(
        DataError, match=r"batch is '1' of rank 0 on \S+ and 2 of rank 3 on \S+\. Give all nodes"
    ):
        agree("agreed_plan:plan", "1/1", other.identity)
    fewer = dict(plan.identity(), sources={"web": {"files": "fewer"}})
    with pytest.raises(DataError, match=r"not the same on all ranks: sources\.web\."):
        agree("agreed_plan:plan", "1/1", lambda: fewer)
    agree("agreed_plan:plan", "2/2", other.identity)  # another world
    (tmp_path / "agreed_plan.py").write_text("# another decode\n")
    with pytest.raises(DataError, match="code and file of the plan is"):
        next(Loader("agreed_plan:plan"))
    monkeypatch.setattr(agreement, "_compared", first)
    next(Loader("agreed_plan:plan"))  # a later one of a rank: all may see other files by now
    be(4)
    again = Loader("agreed_plan:plan")
    again.load_state_dict(state)  # at a restart the saved state tells other files
    next(again)
    monkeypatch.setattr(agreement, "_store", object)  # one that fails says nothing of the plan
    agree("agreed_plan:plan", "1/1", other.identity)
    for each in (loader, again):
        each.close()


def test_without_torch_distributed_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreement._store() is None
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert agreement._store() is None
    agree("some:plan", "1/1", dict)


def test_a_users_source_may_tell_what_json_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(agreement, "_store", lambda: store)
    for _rank in range(2):
        monkeypatch.setattr(agreement, "_compared", {})
        agree("some:plan", "1/1", lambda: {"files": ("a", "b")})
