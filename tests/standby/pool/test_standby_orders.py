"""Orders to Slurm so that the pool becomes what was wished, and those that take it back."""

from __future__ import annotations

from typing import Any

import pytest
from fake_partitions import FakePartitions
from hypothesis import given
from hypothesis import strategies as st
from standby_site import WISH

from robust_slurm.slurm.model import partition_from
from standby.pool import lines, objects
from standby.pool.members import Choice, Wish
from standby.pool.objects import Change, Done


def parts(**given: str) -> dict[str, Any]:
    return dict(FakePartitions(**given).door().partitions())


def told(wish: Wish, choice: Choice, present: dict[str, Any], preempts: bool = False) -> list[str]:
    wanted = objects.targets(wish, choice, present, ALL, {}, preempts)
    return [str(order) for order in objects.changes(wanted, present)]


ALL = [f"{letter}{number}" for letter in "ns" for number in range(10)]
BOTH = Choice(("s1", "s2"), (), {})
UP = "State=UP MaxTime=INFINITE"


@pytest.mark.parametrize(
    ("wish", "choice", "present", "preempts", "orders"),
    [
        (WISH, BOTH, {}, False, ["create PartitionName=standby Nodes=s[1-2] " + UP]),
        (WISH, BOTH, {"standby": "s[1-2]"}, False, []),
        (WISH, BOTH, {"standby": "s2,s9"}, False,
         ["update PartitionName=standby Nodes=s2", "update PartitionName=standby Nodes=s[1-2]"]),
        (WISH, Choice((), (), {}), {"standby": "s1"}, False,
         ["update PartitionName=standby Nodes=(none)"]),
        (Wish("standby", WISH.nodes, 2, "train"), BOTH, {"train": "n1,s[1-3]"}, False,
         ["update PartitionName=train Nodes=n1,s3",
          "create PartitionName=standby Nodes=s[1-2] " + UP]),
        (Wish("standby", WISH.nodes, 2, "train"), Choice(("s1",), ("s2",), {}),
         {"train": "n1,s[1-2]", "standby": "s1"}, False, ["update PartitionName=train Nodes=n1"]),
        (Wish("standby", WISH.nodes, 2, backfill="low"), BOTH, {"standby": "s[1-2]"}, True,
         ["update PartitionName=standby PriorityTier=100",
          "create PartitionName=low Nodes=s[1-2] PriorityTier=1 PreemptMode=REQUEUE " + UP]),
        (Wish("standby", WISH.nodes, 2, backfill="low"), BOTH, {"standby": "s[1-2]"}, False, []),
    ],
)  # fmt: skip
def test_orders(
    wish: Wish, choice: Choice, present: dict[str, str], preempts: bool, orders: list[str]
) -> None:
    assert told(wish, choice, parts(**present), preempts) == orders


def test_a_tier_of_the_sites_own_stays() -> None:
    present = {
        "standby": partition_from(
            {"PartitionName": "standby", "Nodes": "s1", "PriorityTier": "7", "PreemptMode": "OFF"}
        )
    }
    wish = Wish("standby", ("s1",), 1, backfill="low")
    assert told(wish, Choice(("s1",), (), {}), present, True)[0].startswith("create")


NAMES = st.sets(st.sampled_from("abcdefg"), max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["standby", "train"]), NAMES), max_size=8), NAMES, NAMES)
def test_undo_takes_back_exactly_what_was_done(
    orders: list[tuple[str, set[str]]], standby: set[str], train: set[str]
) -> None:
    """Whatever the changes were, also where the partition is not there at the beginning."""
    before = {n: row for n, row in (("standby", standby), ("train", train)) if row or n == "train"}
    now = {name: set(row) for name, row in before.items()}
    done: dict[str, Done] = {}

    def seen() -> dict[str, Any]:
        return parts(**{name: ",".join(sorted(row)) for name, row in now.items()})

    for name, nodes in orders:
        action: Any = "update" if name in now else "create"
        order = Change(action, name, {}, tuple(sorted(nodes)))
        done = objects.record(done, order, seen().get(name))
        now[name] = set(nodes)
    for order in objects.undo(done, seen(), "abcdefg")[0]:
        if order.action == "delete":
            del now[order.partition]
        elif order.nodes is not None:
            now[order.partition] = set(order.nodes)
    assert now == before


def test_undo_leaves_what_others_changed() -> None:
    present = parts(train="n1,n9", standby="s1")
    done = {
        "train": Done(removed=("s1",)),
        "standby": Done(settings={"PriorityTier": ("1", "100")}),
        "low": Done(created=True),
    }
    orders, notes = objects.undo(done, present, ALL)
    assert [str(order) for order in orders] == ["update PartitionName=train Nodes=n[1,9],s1"]
    assert notes == ["partition low is gone already"]  # PriorityTier is back at 1 by itself
    present = parts(standby="s1")
    present["standby"].raw["PriorityTier"] = "50"
    orders, notes = objects.undo({"standby": done["standby"]}, present, ALL)
    assert orders == [] and notes == ["partition standby: PriorityTier=50 is not ours (100): left"]


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("PartitionName=standby Nodes=s1", True),
        ("  partitionname = standby\n", True),
        ("PartitionName=standby2 Nodes=s1", False),
        ("# PartitionName=standby", False),
        ("Include parts.conf", None),
        ("", False),
    ],
)
def test_slurm_conf_has_the_line(text: str, there: bool | None) -> None:
    assert lines.named_in(text, "standby") is there
