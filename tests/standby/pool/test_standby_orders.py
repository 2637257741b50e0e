"""Orders to Slurm so that the pool becomes what was wished."""

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
from standby.pool.objects import AppliedChanges, PartitionChange


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
        (Wish("standby", WISH.nodes, 2, lease="warm"), BOTH, {"standby": "s[1-2]"}, True,
         ["update PartitionName=standby PriorityTier=100",
          "create PartitionName=warm Nodes=s[1-2] PriorityTier=0 PreemptMode=CANCEL "
          "OverSubscribe=FORCE:1 " + UP,
          "create PartitionName=warm-held Nodes=s[1-2] PriorityTier=1 PreemptMode=OFF "
          "OverSubscribe=FORCE:1 " + UP]),
        (Wish("standby", WISH.nodes, 2, lease="warm"), BOTH, {"standby": "s[1-2]"}, False, []),
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


@given(st.lists(NAMES, max_size=8), NAMES)
def test_what_was_taken_out_is_recorded_over_all_runs(
    orders: list[set[str]], before: set[str]
) -> None:
    now = before
    done: dict[str, AppliedChanges] = {}
    for nodes in orders:
        seen = parts(train=",".join(sorted(now))).get("train")
        order = PartitionChange("update", "train", {}, tuple(sorted(nodes & before)))
        done, now = objects.record(done, order, seen), nodes & before
    assert set(done.get("train", AppliedChanges()).removed) == before - now


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
