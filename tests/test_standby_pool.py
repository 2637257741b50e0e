"""The pool of standbys: who joins, what Slurm is told, what is shown, and taken back."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_partitions import FakeJob, FakePartitions
from hypothesis import given
from hypothesis import strategies as st

from health import history
from health.proof import EVERY_S, Proof, due, proof_of
from health.system import Event
from robust_slurm.config import ConfigError
from robust_slurm.slurm import Completed, Slurm, SlurmError
from robust_slurm.slurm.model import node_from, partition_from
from robust_slurm.slurm.values import expand
from standby import keep_warm, lines, objects, pool_cli, pool_file, pool_settings, preread
from standby.objects import Change, Done
from standby.pool import Choice, Member, Sight, Use, Wish, choose, demote, refill, uses, why_not
from standby.pool_settings import place
from status.cli import main as robust_status

NOW = 1_800_000_000.0
HOUR = 3600.0
WELL = Proof(passed=NOW - 60)
OLD = Member(NOW - 1000)


# -- what the gate's history proves


def event(kind: str, age_s: float, **data: Any) -> Event:
    return Event(NOW - age_s, kind, "b", data)


@pytest.mark.parametrize(
    ("events", "proof"),
    [
        ([], Proof()),
        ([event("boot", 9), event("xid", 8), event("skip", 7)], Proof()),
        ([event("pass", 9)], Proof(NOW - 9)),
        ([event("pass", 9), event("run", 5, closed=False)], Proof(NOW - 5)),
        ([event("run", 5, closed=True, reason="r")], Proof(0, NOW - 5, "r")),
        (
            [event("drain", 9, reason="r"), event("undrain", 5, reason="r")],
            Proof(NOW - 5, NOW - 9, "r", NOW - 5),
        ),
        ([event("run", 5, closed="no")], Proof()),  # neither true nor false: nothing is proven
        ([event("run", 5, closed=False, findings=[{"status": "WARN"}])], Proof(NOW - 5)),
        # A check that could not tell, and whose trouble the gate tolerates.
        ([event("run", 5, closed=False, findings=[{"status": "ERROR"}])], Proof()),
        ([event("run", 5, closed=False, ran=[["nvml", 3.0, "ERROR"]])], Proof()),
        ([event("run", 5, closed=False, findings="x")], Proof()),
        ([event("pass", 9), event("run", 5, closed=False, findings=[3])], Proof(NOW - 9)),
    ],
)
def test_proof(events: list[Event], proof: Proof) -> None:
    assert proof_of(events) == proof


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], True),
        ([event("pass", 60)], False),
        ([event("run", 60, closed=False)], False),
        ([event("pass", EVERY_S + 1)], True),
        ([event("pass", -60)], True),  # a clock that went back
        ([event("run", 60, closed=True)], True),
    ],
)
def test_a_pass_is_written_once_an_hour(events: list[Event], expected: bool) -> None:
    assert due(events, NOW) is expected


# -- who joins


def sight(
    nodes: str = "s1 s2 s3",
    jobs: dict[int, FakeJob] | None = None,
    proofs: dict[str, Proof] | None = None,
    unread: str = "",
    **partitions: str,
) -> Sight:
    """``nodes``: names, with their flags behind a slash."""
    found = {}
    for word in nodes.split():
        name, _, state = word.partition("/")
        found[name] = node_from({"NodeName": name, "State": state or "IDLE"})
    fake = FakePartitions(**partitions)
    fake.jobs = dict(jobs or {})
    return Sight(
        found,
        fake.door().partitions(),
        fake.door().placements(),
        dict.fromkeys(found, WELL) if proofs is None else proofs,
        NOW,
        unread,
    )


WISH = Wish("standby", ("s1", "s2", "s3"), 3)


@pytest.mark.parametrize(
    ("why", "state", "proof", "more"),
    [
        ("", "IDLE", WELL, {}),
        ("", "MIXED", WELL, {}),
        ("DRAIN+IDLE", "IDLE+DRAIN", WELL, {}),
        ("DOWN+NOT_RESPONDING", "DOWN*", WELL, {}),
        ("no check of it is on record", "IDLE", Proof(), {}),
        ("its last check failed 2 min ago: r", "IDLE", Proof(NOW - 200, NOW - 120, "r"), {}),
        ("", "IDLE", Proof(NOW - 60, NOW - 120, "r"), {}),
        ("last seen well 25 h ago, 24 h are allowed", "IDLE", Proof(NOW - 25 * HOUR), {}),
        ("", "IDLE", Proof(), {"proof_hours": 0.0}),
        ("its clock, or this one", "IDLE", Proof(NOW + HOUR), {}),
    ],
)
def test_admission(why: str, state: str, proof: Proof, more: dict[str, Any]) -> None:
    wish = Wish("standby", ("s1",), 1, **more)
    said = why_not("s1", wish, sight(f"s1/{state}", proofs={"s1": proof}))
    assert said.startswith(why) if why else said == ""


def test_unknown_nodes_and_a_ledger_that_is_not_there() -> None:
    assert why_not("x9", WISH, sight()) == "Slurm knows no such node"
    assert "disk is dead" in why_not("s1", WISH, sight(unread="disk is dead"))


COMPANION = FakeJob("standby", "s1")
LOW = FakeJob("low", "s1")
TRAIN = FakeJob("train", "s1")


@pytest.mark.parametrize(
    ("what", "wish", "seen", "admitted", "members", "claims"),
    [
        ("all join", WISH, sight(), {}, "s1 s2 s3", ""),
        ("no more than wanted", Wish("standby", WISH.nodes, 2), sight(), {}, "s1 s2", ""),
        ("no change without need", Wish("standby", WISH.nodes, 1), sight(), {"s3": OLD}, "s3", ""),
        ("surplus leaves, the last named first", Wish("standby", WISH.nodes, 1), sight(),
         {"s2": OLD, "s3": OLD}, "s2", ""),
        ("who is in use does not count", Wish("standby", WISH.nodes, 1),
         sight(jobs={1: COMPANION}), {"s1": OLD}, "s1 s2", ""),
        ("who is lent does", Wish("standby", WISH.nodes, 1, backfill="low"),
         sight(jobs={1: LOW}), {"s1": OLD}, "s1", ""),
        ("a drained member keeps its place and is replaced", Wish("standby", WISH.nodes, 1),
         sight("s1/IDLE+DRAIN s2 s3"), {"s1": OLD}, "s1 s2", ""),
        ("members need no new proof", WISH, sight(proofs={}), {"s1": OLD}, "s1", ""),
        ("nor while the ledger is away", WISH, sight(unread="dead"), {"s1": OLD}, "s1", ""),
        ("busy nodes come when their jobs are over", WISH, sight(jobs={1: TRAIN}), {},
         "s2 s3", "s1"),
        ("and are not asked when idle ones do", Wish("standby", WISH.nodes, 2),
         sight(jobs={1: TRAIN}), {}, "s2 s3", ""),
        ("who is no longer named leaves", Wish("standby", ("s1",), 1), sight(),
         {"s1": OLD, "s2": OLD}, "s1", ""),
        ("but not from under a companion", Wish("standby", ("s2",), 1),
         sight(jobs={1: COMPANION}), {"s1": OLD, "s2": OLD}, "s2 s1", ""),
        ("a node that is gone", WISH, sight("s1 s2"), {"s1": OLD, "s3": OLD}, "s1 s2", ""),
        ("a stranger in the partition is as any other", WISH, sight(proofs={"s2": WELL},
         standby="s1,s2"), {}, "s2", ""),
    ],
)  # fmt: skip
def test_choice(
    what: str, wish: Wish, seen: Sight, admitted: dict[str, Member], members: str, claims: str
) -> None:
    found = choose(wish, seen, admitted)
    assert (found.members, found.claims) == (tuple(members.split()), tuple(claims.split())), what


BACK = Proof(NOW - 60, NOW - 600, "r", NOW - 60)


@pytest.mark.parametrize(
    ("policy", "proof", "where"),
    [
        ("pool", BACK, "pool"),
        ("train", BACK, "train"),
        ("pool", WELL, "train"),
        ("pool", BACK._replace(undrained=NOW - 25 * HOUR), "train"),
    ],
)
def test_refill(policy: Any, proof: Proof, where: str) -> None:
    wish = Wish("standby", ("s1",), 1, "train", refill=policy)
    assert refill(wish, proof, NOW) == where


def test_a_repaired_node_joins_while_the_pool_is_short_and_leaves_first() -> None:
    wish = Wish("standby", ("s1", "s2"), 2, "train", refill="pool")
    proofs = {"s1": WELL, "s2": WELL, "n5": BACK, "n6": WELL}
    short = sight("s1 s2/IDLE+DRAIN n5 n6", proofs=proofs, train="n5,n6")
    admitted = {"s1": OLD, "s2": OLD}
    assert choose(wish, short, admitted).members == ("s1", "s2", "n5")
    full = sight("s1 s2 n5 n6", proofs=proofs, train="n6")
    back = choose(wish, full, {**admitted, "n5": Member(NOW, returned=True)})
    assert back.members == ("s1", "s2")
    # Taken out of train while busy: it is on its way, though train has it no more.
    busy = sight("s1 s2/IDLE+DRAIN n5", {1: FakeJob("train", "n5")}, proofs, train="n6")
    assert choose(wish, busy, admitted, taken=("n5",)).claims == ("n5",)


def test_a_job_that_starts_meanwhile_keeps_its_node() -> None:
    choice = Choice(("s1", "s2"), (), {})
    seen = sight(jobs={1: TRAIN})
    assert demote(choice, WISH, seen, {}) == Choice(("s2",), ("s1",), {})
    assert demote(choice, WISH, seen, {"s1": OLD}) == choice
    assert demote(choice, WISH, sight(jobs={1: COMPANION}), {}) == choice


def test_uses() -> None:
    jobs = {1: COMPANION, 2: LOW, 3: TRAIN, 4: FakeJob("standby", "", "PENDING")}
    jobs[5] = FakeJob("standby", "s2", "COMPLETED")
    wish = Wish("standby", ("s1",), 1, backfill="low")
    assert uses(wish, sight(jobs=jobs).jobs) == {"s1": Use((1,), (2,), (3,))}


# -- what Slurm is told


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


# -- the commands


class Site:
    """A state directory with the gate's ledger, and Slurm."""

    def __init__(self, path: Path, **partitions: str) -> None:
        for above in (path, *path.parents):
            if "pytest" in above.name:  # writable by its owner alone, as the ledger must be
                above.chmod(0o755)
        self.state = path / "state"
        (self.state / "nodes").mkdir(parents=True, mode=0o755)
        self.slurm = FakePartitions(**(partitions or {"train": "n[1-2]", "standby": "s[1-3]"}))
        self.well(*self.slurm.nodes)

    def well(self, *names: str, age_s: float = 60.0) -> None:
        self.happened(Event(time.time() - age_s, "pass", "b", {}), *names)

    def happened(self, event: Event, *names: str) -> None:
        for name in names:
            with (self.state / "nodes" / f"{name}.jsonl").open("ab") as file:
                file.write(history.line(event))

    def run(self, *words: str) -> tuple[int, str]:
        out = io.StringIO()
        code = pool_cli.main([*words, "--state-dir", str(self.state)], self.slurm.door(), out)
        return code, out.getvalue()

    def apply(self, *words: str, code: int = 0) -> str:
        found, text = self.run("apply", "--yes", *words)
        assert found == code, text
        return text

    @property
    def record(self) -> pool_file.Record:
        found = pool_file.load(str(self.state))
        assert found is not None
        return found


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_apply_show_revert(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n[1-2],s[1-3]")
    site.slurm.preempt()
    text = site.apply("--nodes", "s[1-3]", "--size", "2", "--from", "train", "--backfill", "low")
    assert "pool standby: 2 of 2 nodes free" in text
    assert "PartitionName=standby Nodes=s[1-2] PriorityTier=100" in text  # for slurm.conf
    assert site.slurm.nodes_of("train") == "n[1-2],s3"
    assert site.slurm.nodes_of("standby") == site.slurm.nodes_of("low") == "s[1-2]"
    assert site.slurm.orders[0].startswith("update train")  # out of train before anything else
    assert list(site.record.admitted) == ["s1", "s2"]
    assert "PartitionName=low" in (site.state / "standby" / "slurm.conf.lines").read_text()

    site.slurm.orders.clear()
    assert "nothing to change" in site.apply() and site.slurm.orders == []
    site.slurm.jobs = {
        4: FakeJob("standby", "s1", comment="robust: standby of job 3"),
        5: FakeJob("low", "s2"),
    }
    code, shown = site.run("show")
    assert code == 1  # one in use, so one is missing
    assert "pool standby: 1 of 2 nodes free (1 lent), 1 in use; short 1" in shown
    assert "job 4, standby of job 3" in shown and "lent to job 5" in shown

    code, text = site.run("revert", "--yes")
    assert code == 1 and "in use: job 4 of ada" in text and "--force" in text
    assert site.slurm.orders == []
    code, text = site.run("revert", "--yes", "--force")
    assert code == 0 and site.slurm.jobs == {}
    assert {n: site.slurm.nodes_of(n) for n in site.slurm.partitions} == {"train": "n[1-2],s[1-3]"}
    assert pool_file.load(str(site.state)) is None
    assert site.run("revert", "--yes") == (0, "nothing was applied\n")


def test_only_proven_nodes_join(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n1", standby="s[1-3]")
    drain = Event(time.time() - 30, "drain", "b", {"reason": "robust:node:xid-79:gpu0:reboot:job4"})
    site.happened(drain, "s2")
    (site.state / "nodes" / "s3.jsonl").unlink()
    text = site.apply("--nodes", "s[1-4]")
    assert "not admitted: s2: its last check failed 30 s ago: robust:node:xid-79" in text
    assert "not admitted: s3: no check of it is on record" in text
    assert "not admitted: s4: Slurm knows no such node" in text
    assert site.slurm.nodes_of("standby") == "s1"
    site.happened(Event(time.time(), "undrain", "b", {}), "s2")
    site.apply()
    assert site.slurm.nodes_of("standby") == "s[1-2]"
    assert site.run("revert", "--yes")[0] == 0
    assert site.slurm.nodes_of("standby") == "s[1-3]"  # as it was found


def test_a_file_that_a_user_could_have_written_proves_nothing(site: Site) -> None:
    (site.state / "nodes" / "s1.jsonl").chmod(0o666)
    assert "not admitted: s1: no check" in site.apply("--nodes", "s[1-3]")


def test_what_slurm_lost_is_shown_and_made_again(site: Site) -> None:
    site.slurm.partitions["train"]["Nodes"] = "n[1-2],s[1-3]"
    del site.slurm.partitions["standby"]
    site.apply("--nodes", "s[1-3]", "--from", "train")
    del site.slurm.partitions["standby"]  # a reconfigure
    site.slurm.partitions["train"]["Nodes"] = "n[1-2],s[1-3]"
    code, shown = site.run("show")
    assert code == 1 and "there is no partition standby" in shown
    assert "partition train has s[1-3]" in shown
    site.apply()
    assert site.slurm.nodes_of("standby") == "s[1-3]" and site.slurm.nodes_of("train") == "n[1-2]"
    assert site.run("show")[0] == 0
    site.run("revert", "--yes")
    assert site.slurm.nodes_of("train") == "n[1-2],s[1-3]"


def test_without_preemption_nothing_is_lent(site: Site) -> None:
    text = site.apply("--nodes", "s[1-3]", "--backfill", "low")
    assert "low" not in site.slurm.partitions
    assert "slurm.conf needs PreemptType=preempt/partition_prio and PreemptMode=REQUEUE" in text
    site.slurm.preempt()
    site.apply()
    assert site.slurm.nodes_of("low") == "s[1-3]"


def test_preemption_that_was_switched_off_later(site: Site) -> None:
    config = dict(site.slurm.config)
    site.slurm.preempt()
    site.apply("--nodes", "s[1-3]", "--backfill", "low")
    site.slurm.config = config
    text = site.apply("--size", "2")
    assert site.slurm.nodes_of("low") == site.slurm.nodes_of("standby") == "s[1-2]"
    for said in (text, site.run("show")[1]):
        assert "jobs in partition low make no way for companions" in said
        assert "no partition low yet" not in said
    assert site.run("revert", "--yes")[0] == 0 and "low" not in site.slurm.partitions


def test_a_node_that_slurm_no_longer_knows_is_named_in_no_order(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n[1-2],s[1-3]")
    site.apply("--nodes", "s[1-3]", "--from", "train")
    del site.slurm.nodes["s2"]
    for partition in ("train", "standby"):  # as the restarted slurmctld has them
        nodes = [n for n in expand(site.slurm.nodes_of(partition)) if n != "s2"]
        site.slurm.partitions[partition]["Nodes"] = ",".join(nodes)
    gone = "note: partition train: Slurm knows no node s2: left out"
    assert gone in site.apply("--size", "1")
    assert site.slurm.nodes_of("train") == "n[1-2],s3"
    assert gone in site.run("show")[1] and "lacks" not in site.run("show")[1]
    code, text = site.run("revert", "--yes")
    assert code == 0 and gone in text
    assert site.slurm.partitions["train"]["TotalNodes"] == "4"
    assert site.slurm.nodes_of("train") == "n[1-2],s[1,3]"


def test_a_partition_of_somebody_elses_is_not_made_smaller(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.apply("--nodes", "s[1-2]", code=2)
    assert "--partition standby" in capsys.readouterr().err and site.slurm.orders == []
    site.apply("--nodes", "s[1-3]", "--backfill", "train", code=2)
    said = capsys.readouterr().err
    assert "--backfill train" in said and "n[1-2]" in said and site.slurm.orders == []
    site.apply("--nodes", "s[1-3]")
    site.apply("--nodes", "s[1-2]")  # ours by now
    assert site.slurm.nodes_of("standby") == "s[1-2]"


def test_revert_says_what_slurm_conf_needs(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n[1-2],s[1-3]")
    file = tmp_path / "slurm.conf"
    file.write_text("PartitionName=train Nodes=n[1-2]\nPartitionName=standby Nodes=s[1-3]\n")
    site.slurm.config["SLURM_CONF"] = str(file)
    site.apply("--nodes", "s[1-3]", "--from", "train")
    text = site.run("revert", "--yes")[1]
    assert "slurm.conf still has partition standby: its line brings it back" in text
    assert (
        "partition train was changed for the pool, write there again: Nodes=n[1-2],s[1-3]" in text
    )


def test_what_changes_while_it_asks_is_asked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(question: str) -> bool:
        asked.append(question)
        if len(asked) == 1:
            site.slurm.nodes["s1"] = ("IDLE+DRAIN", "broken")
        return True

    monkeypatch.setattr(pool_cli.flow, "confirm", confirm)
    code, text = site.run("apply", "--nodes", "s[1-3]", "--size", "1")
    assert code == 0 and len(asked) == 2 and "not as it was" in text
    assert site.slurm.nodes_of("standby") == "s2"
    asked.clear()

    def starts(question: str) -> bool:
        asked.append(question)
        site.slurm.jobs = {4: FakeJob("standby", "s2")}
        return True

    monkeypatch.setattr(pool_cli.flow, "confirm", starts)
    code, text = site.run("revert")
    assert code == 1 and len(asked) == 1 and "in use: job 4" in text
    assert site.slurm.nodes_of("standby") == "s2" and 4 in site.slurm.jobs


# -- whose settings count


def test_root_follows_the_sites_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Site(tmp_path)  # directories that root may trust
    own, file = tmp_path / "robust.toml", tmp_path / "site.toml"
    own.write_text('state_dir = "/users"\nstandby_partition = "theirs"\n')
    file.write_text('state_dir = "/shared/"\nstandby_partition = "spare"\n')
    monkeypatch.chdir(tmp_path)
    environ = {"ROBUST_STATE_DIR": "/tmp/x", "ROBUST_CONFIG": str(own)}
    named = {**environ, "ROBUST_SITE_CONFIG": str(file)}
    assert place(None, named, 0) == ("/shared", "spare")
    assert place("rel", named, 0) == (str(tmp_path / "rel"), "spare")
    monkeypatch.setattr(pool_settings, "SITE_FILE", str(tmp_path / "none.toml"))
    assert place(None, environ, 0) == ("", "standby")
    assert place(None, environ, 1000) == ("/tmp/x", "theirs")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ('state_dir = "/x"', 0o666),
        ('state_dir = "x"', 0o644),
        ("state_dir = 3", 0o644),
        ('state_dir = "~/x"', 0o644),
        ('standby_partition = "a b"', 0o644),
        ("[", 0o644),
        (None, 0),
    ],
)
def test_a_file_that_root_does_not_use(
    site: Site, text: str | None, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.state / "site.toml"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    monkeypatch.setenv("ROBUST_SITE_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"site\.toml"):
        place(None, os.environ, 0)


def test_dry_run_changes_nothing(site: Site) -> None:
    code, text = site.run("apply", "--dry-run", "--nodes", "s[1-3]", "--size", "1")
    assert code == 0 and text == "update PartitionName=standby Nodes=s1\n"
    assert site.run("revert", "--dry-run") == (0, "nothing was applied\n")
    assert site.slurm.orders == [] and not (site.state / "standby").exists()


@pytest.mark.parametrize(
    "words",
    [
        "apply",
        "apply --yes",
        "apply --nodes s[1-",
        "apply --nodes s[1-3] --size -1",
        "apply --nodes s[1-3] --size 1.5",
        "apply --nodes s[1-3] --partition a/b",
        "apply --nodes s[1-3] --partition p;q --yes",
        "apply --nodes s[1-3] --from standby --yes",
        "apply --nodes s[1-3] --from nowhere --yes",
        "apply --nodes s[1-3] --refill pool --yes",
        "apply --nodes s[1-3] --refill nope",
        "apply --nodes s[1-3] --proof-hours nan",
        "apply --nodes s[1-3] --qos high --yes",
        "apply --nodes s[1-3] --size 1",  # no terminal to ask on
        "apply --nodes s[1-3] --size 4 --yes",
        "apply --nodes s[1-99999999] --yes",
        "apply --nodes s[1-3] --yes --partition train",  # has other nodes, and is not ours
        "apply --nodes s[1-3] --yes --backfill train",
        "show --what",
        "warm",
        "warm --gib 1e-10 /x",
        "",
    ],
)
def test_bad_input(site: Site, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given_ = words.split()
    code = pool_cli.main([*given_, "--state-dir", str(site.state)], site.slurm.door())
    assert code == 2 and site.slurm.orders == []
    assert capsys.readouterr().err


def test_a_qos_needs_a_slurmdbd(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.run("apply", "--yes", "--nodes", "s1", "--qos", "high")
    assert "needs slurmdbd" in capsys.readouterr().err
    site.slurm.config["AccountingStorageType"] = "accounting_storage/slurmdbd"
    site.apply("--nodes", "s[1-3]", "--qos", "high")
    assert site.slurm.orders == ["update standby QoS=high"]
    site.apply("--qos", "none")
    assert site.slurm.orders[1:] == ["update standby QoS="]
    site.slurm.partitions["standby"]["QoS"] = "other"  # from now on it is not our affair
    assert "nothing to change" in site.apply()
    assert site.run("revert", "--yes")[0] == 0
    assert len(site.slurm.orders) == 2 and site.slurm.partitions["standby"]["QoS"] == "other"


def test_the_qos_of_a_partition_of_ours(site: Site) -> None:
    site.slurm.config["AccountingStorageType"] = "accounting_storage/slurmdbd"
    site.apply("--nodes", "s[1-3]", "--partition", "own", "--qos", "high")
    site.apply("--qos", "none")
    assert site.slurm.orders[1:] == ["update own QoS="]
    text = (site.state / "standby" / "slurm.conf.lines").read_text()
    assert "PartitionName=own" in text and "QoS" not in text
    site.apply("--qos", "low")
    site.run("revert", "--yes")
    assert site.slurm.orders[2:] == ["update own QoS=low", "delete own"]


@pytest.mark.parametrize("word", ["apply --yes --nodes s1", "show", "revert --yes", "warm /x"])
def test_slurmctld_is_down(site: Site, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    site.apply("--nodes", "s[1-3]")
    site.slurm.down = True
    assert site.run(*word.split())[0] == 1
    assert "no slurmctld answers" in capsys.readouterr().err


def test_without_the_right(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.slurm.denied = True
    words = ("--nodes", "s[1-3]", "--size", "1")
    site.apply(*words, code=1)
    assert "root and SlurmUser" in capsys.readouterr().err
    assert pool_file.load(str(site.state)) is None  # nothing was done, so nothing is recorded
    site.slurm.denied = False
    site.apply(*words)
    before = site.record
    site.slurm.denied = True
    site.apply("--size", "3", code=1)
    assert site.record == before  # nor is it wished


@pytest.mark.parametrize("said", ["Unable to contact slurm controller", "insane message length"])
def test_an_order_whose_answer_was_lost_is_taken_back(site: Site, said: str) -> None:
    site.slurm.lost = f"slurm_create_partition error: {said}"
    site.apply("--partition", "other", "--nodes", "s[1-3]", code=1)
    assert site.record.done["other"].created and "other" in site.slurm.partitions
    site.slurm.lost = ""
    assert site.run("revert", "--yes")[0] == 0 and "other" not in site.slurm.partitions


def test_without_slurms_commands(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    def none(argv: Any, *_: Any) -> Any:
        raise SlurmError("other", argv, "scontrol is not in PATH", "install them")

    words = ["apply", "--yes", "--nodes", "s[1-3]", "--state-dir", str(site.state)]
    assert pool_cli.main(words, Slurm(none, environ={})) == 1
    said = capsys.readouterr().err
    assert "not in PATH" in said and "slurmctld answers" not in said


BROKEN = '{"wish": {"partition": "\xff", "nodes": [], "size": 0}}'


@pytest.mark.parametrize("content", ["{}", "[", '{"wish": 3}', '{"v": 2}', "\xff", BROKEN])
def test_a_broken_record(site: Site, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    site.apply("--nodes", "s[1-3]")
    (site.state / "standby" / "pool.json").write_text(content, encoding="latin-1")
    assert site.run("show")[0] == 1
    assert "pool.json" in capsys.readouterr().err
    out = io.StringIO()
    assert robust_status(["--state-dir", str(site.state)], site.slurm.door(), out) == 0
    assert "is no record of a pool" in out.getvalue()


def test_one_at_a_time(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with pool_file.locked(str(site.state)):
        assert site.run("apply", "--yes", "--nodes", "s[1-3]")[0] == 1
    assert "another robust-standby" in capsys.readouterr().err


def test_no_state_directory(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["apply", "--yes", "--nodes", "s1", "--state-dir", str(site.state / "not-mounted")]
    assert pool_cli.main(words, site.slurm.door()) == 1
    assert "not-mounted" in capsys.readouterr().err and not (site.state / "not-mounted").exists()


def test_partitions_keep_their_names(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.apply("--nodes", "s[1-3]", "--size", "1")
    site.apply("--partition", "other", code=2)
    assert "revert first" in capsys.readouterr().err


def test_json(site: Site) -> None:
    site.apply("--nodes", "s[1-3]")
    code, text = site.run("show", "--json")
    found = json.loads(text)
    assert code == 0 and found["stock"]["free"] == 3 and found["stock"]["short"] == 0
    assert [row["node"] for row in found["rows"]] == ["s1", "s2", "s3"]
    assert all(50 < row["checked_s"] < 600 for row in found["rows"])


def test_robust_status_says_it(site: Site) -> None:
    site.apply("--nodes", "s[1-3]")
    site.slurm.nodes["s2"] = ("IDLE+DRAIN", "robust:node:xid-79:gpu0:reboot:job4")
    site.slurm.jobs = {4: FakeJob("standby", "s1")}
    out = io.StringIO()
    assert robust_status(["--state-dir", str(site.state)], site.slurm.door(), out) == 0
    line = next(one for one in out.getvalue().splitlines() if one.startswith("pool"))
    assert line.startswith("pool standby: 1 of 3 nodes free, 1 in use, 1 out of service; short 2")
    assert "oldest check" in line and " for " not in line  # since when, nobody has seen
    site.apply()
    out = io.StringIO()
    robust_status(["--state-dir", str(site.state)], site.slurm.door(), out)
    assert "; short 2 for " in out.getvalue()
    out = io.StringIO()
    robust_status(["--state-dir", str(site.state), "--json"], site.slurm.door(), out)
    assert json.loads(out.getvalue())["pool"]["short"] == 2


# -- keeping warm


def test_preread_reads_files_and_keeps_its_bounds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3000)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b").write_bytes(b"y" * 2000)
    (tmp_path / "link").symlink_to("/dev/zero")
    found = preread.preread([str(tmp_path)], 1 << 20, 60.0)
    assert (found["files"], found["bytes"], found["all"], found["errors"]) == (2, 5000, True, [])
    found = preread.preread([str(tmp_path)], 3500, 60.0)
    assert found["bytes"] == 3500 and not found["all"]
    assert preread.preread([str(tmp_path)], 1 << 20, 0.0)["bytes"] == 0
    found = preread.preread([str(tmp_path / "none"), "/dev/null"], 1 << 20, 60.0)
    assert found["files"] == 0 and not found["all"] and len(found["errors"]) == 2
    assert preread.room() > 1 << 20


def test_a_directory_that_cannot_be_read_counts_as_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "below").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("below"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    found = preread.preread([str(tmp_path)], 1 << 20, 60.0)
    assert found["files"] == 1 and not found["all"]
    assert found["errors"] == [f"{tmp_path}/below: Permission denied"]


@pytest.mark.parametrize(
    ("answer", "text", "well"),
    [
        ('{"files": 2, "bytes": 3e9, "seconds": 1, "all": true, "errors": []}', "3.00 GB", True),
        ('{"files": 2, "bytes": 3, "seconds": 1, "all": false, "errors": []}', "is more", True),
        ('{"files": 0, "bytes": 0, "seconds": 1, "all": false, "errors": ["no"]}', "; no", False),
        ("", "no answer", False),
        ("[]", "no answer", False),
        ('{"files": "\\u001b[2J", "bytes": 3, "seconds": 1, "all": true, "errors": []}',
         "no answer", False),
        # Names of files are anybody's: escapes, and bytes that are no UTF-8.
        ('{"files": 1, "bytes": 3, "seconds": 1, "all": false, "errors": '
         '["/d/\\u001b]0;x\\u0007\\udc80: no"]}', "; /d/?]0;x??: no", False),
    ],
)  # fmt: skip
def test_answers_of_preread(answer: str, text: str, well: bool) -> None:
    said, good = keep_warm.told(answer)
    assert text in said and good is well and said.isprintable()


def test_only_idle_standbys_are_warmed() -> None:
    wish = Wish("standby", ("s1", "s2", "s3"), 3, backfill="low")
    seen = sight("s1 s2/IDLE+DRAIN s3 s4", {1: LOW}, standby="s[1-3]")
    assert keep_warm.idle(wish, seen) == ["s3"]
    words = keep_warm.argv("low", "s3", "/p", ["/data"], 0, 45.0)
    assert "--partition=low" in words and "--time=2" in words and words[-1] == "/data"


def test_warm_runs_our_own_python_where_jobs_make_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dict(site.slurm.config)
    site.slurm.preempt()
    site.apply("--nodes", "s[1-3]", "--size", "1", "--backfill", "low")
    ran: list[list[str]] = []

    def run(words: list[str], *_: Any) -> Completed:
        ran.append(words)
        answer = {"files": 1, "bytes": 3, "seconds": 1, "all": True, "errors": []}
        return Completed(0, json.dumps(answer), "")

    monkeypatch.setattr(keep_warm, "run_command", run)
    monkeypatch.setenv("ROBUST_TASK_PYTHON", "/home/ada/python")
    code, text = site.run("warm", "/data")
    assert code == 0 and "s1  read 1 files" in text and "note" not in text
    site.slurm.config = config  # jobs of low make no way any more
    code, text = site.run("warm", "/data")
    assert code == 0 and "a companion waits for these jobs" in text
    assert [words[2] for words in ran] == ["--partition=low", "--partition=standby"]
    assert all(sys.executable in words and "/home/ada/python" not in words for words in ran)


# -- the door


def test_no_words_of_scontrol_come_in_by_a_name() -> None:
    slurm = FakePartitions(standby="s1")
    for name, settings in (
        ("a b", {}),
        ("a/b", {}),
        ("", {}),
        ("standby", {"Nodes": "s1 State=DOWN"}),
        ("standby", {"QoS": "a\nb"}),
    ):
        with pytest.raises(SlurmError) as caught:
            slurm.door().update_partition(name, settings)
        assert caught.value.kind == "invalid"
    assert slurm.orders == []


def test_placements() -> None:
    slurm = FakePartitions(standby="s1")
    slurm.jobs = {
        1: FakeJob("standby", "s[1-2,4]"),
        2: FakeJob("standby", "", "PENDING"),
        3: FakeJob("standby", "s9", "COMPLETED"),
        4: FakeJob("low", "s3", "COMPLETING"),
    }
    found = slurm.door().placements()
    assert {n: (p.partition, p.nodes) for n, p in found.items()} == {
        1: ("standby", ("s1", "s2", "s4")),
        4: ("low", ("s3",)),
    }


def test_a_partition_in_use_is_a_conflict() -> None:
    slurm = FakePartitions(standby="s1")
    slurm.jobs = {1: FakeJob("standby", "s1")}
    with pytest.raises(SlurmError) as caught:
        slurm.door().delete_partition("standby")
    assert caught.value.kind == "conflict"
