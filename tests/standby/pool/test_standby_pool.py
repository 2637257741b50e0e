"""robust-standby apply and show, with everything as it should be or changing meanwhile."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from fake_partitions import FakeJob
from standby_site import Site

from health.node.system import Event
from robust_slurm.slurm.values import expand
from standby.pool import cli
from status.cli import main as robust_status


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_apply_show_give_back(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n[1-2],s[1-3]")
    site.slurm.preempt()
    text = site.apply("--nodes", "s[1-3]", "--size", "2", "--from", "train", "--backfill", "low")
    assert "pool standby: 2 of 2 nodes free" in text
    assert "PartitionName=standby Nodes=s[1-2] PriorityTier=100" in text  # for slurm.conf
    assert site.slurm.nodes_of("train") == "n[1-2],s3"
    assert site.slurm.nodes_of("standby") == site.slurm.nodes_of("low") == "s[1-2]"
    assert site.slurm.orders[0].startswith("update train")  # out of train before anything else
    assert list(site.record.admitted) == ["s1", "s2"]
    assert "PartitionName=low Nodes=s[1-2]" in text and "# partition low, created by" in text

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

    site.apply("--size", "0")  # the node in use stays until its job ends
    assert site.slurm.nodes_of("standby") == site.slurm.nodes_of("low") == "s1"
    site.slurm.jobs, site.slurm.nodes["s1"] = {}, ("IDLE+DRAIN", "robust:node:xid-79")
    site.apply()
    assert site.slurm.nodes_of("train") == "n[1-2],s[1-3]"
    assert site.slurm.nodes_of("standby") == site.slurm.nodes_of("low") == ""


def test_the_record_of_the_last_release_is_read(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n[1-2],s[1-3]")
    site.apply("--nodes", "s[1-3]", "--from", "train")
    file = site.state / "standby" / "pool.json"
    old = json.loads(file.read_text())
    for one in old["done"].values():
        one |= {"settings": {"QoS": ["", "high"]}, "added": []}
    file.write_text(json.dumps(old))
    site.apply("--size", "1")
    assert site.slurm.nodes_of("train") == "n[1-2],s[2-3]"


def test_only_proven_nodes_join(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n1", standby="s[1-3]")
    drain = Event(time.time() - 30, "drain", "b", {"reason": "robust:node:xid-79:gpu0:reboot:job4"})
    site.happened(drain, "s2")
    (site.state / "nodes" / "s3.jsonl").unlink()
    text = site.apply("--nodes", "s[1-4]")
    assert "not admitted: s2: its last check failed 30 s ago: robust:node:xid-79" in text
    assert "not admitted: s3: no check is on record" in text
    assert "not admitted: s4: Slurm does not know this node" in text
    assert site.slurm.nodes_of("standby") == "s1"
    site.happened(Event(time.time(), "undrain", "b", {}), "s2")
    site.apply()
    assert site.slurm.nodes_of("standby") == "s[1-2]"


def test_only_burned_in_nodes_join_where_the_pool_asks_for_it(site: Site) -> None:
    burned = Event(time.time() - 30 * 3600, "burn-in", "", {"ok": True})
    site.happened(burned, "s1")
    for age in range(800, 0, -1):  # more than is read for the checks
        site.happened(Event(time.time() - age, "run", "b", {"closed": False, "x": "y" * 80}), "s1")
    text = site.apply("--nodes", "s[1-3]", "--burn-in-hours", "72")
    assert list(site.record.admitted) == ["s1"]
    assert "not admitted: s2: no passed burn-in is on record; run robust-health burn-in" in text
    shown = site.run("show")[1]
    assert "BURN-IN" in shown and "30 h ago" in shown
    site.apply("--burn-in-hours", "0")
    assert list(site.record.admitted) == ["s1", "s2", "s3"]
    assert "BURN-IN" not in site.run("show")[1]


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
    assert code == 1 and "create PartitionName=standby" in shown
    assert "update PartitionName=train Nodes=n[1-2]" in shown
    site.apply()
    assert site.slurm.nodes_of("standby") == "s[1-3]" and site.slurm.nodes_of("train") == "n[1-2]"
    assert site.run("show")[0] == 0
    site.apply("--size", "0")
    assert site.slurm.nodes_of("train") == "n[1-2],s[1-3]"


def test_without_preemption_nothing_is_lent(site: Site) -> None:
    text = site.apply("--nodes", "s[1-3]", "--backfill", "low")
    assert "low" not in site.slurm.partitions
    assert (
        "write PreemptType=preempt/partition_prio and PreemptMode=REQUEUE into slurm.conf" in text
    )
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
        assert "jobs in partition low are not preempted" in said
        assert "partition low is not created" not in said


def test_a_node_that_slurm_no_longer_knows_is_named_in_no_order(tmp_path: Path) -> None:
    site = Site(tmp_path, train="n[1-2],s[1-3]")
    site.apply("--nodes", "s[1-3]", "--from", "train")
    del site.slurm.nodes["s2"]
    for partition in ("train", "standby"):  # as the restarted slurmctld has them
        nodes = [n for n in expand(site.slurm.nodes_of(partition)) if n != "s2"]
        site.slurm.partitions[partition]["Nodes"] = ",".join(nodes)
    gone = "note: partition train: Slurm does not know node s2; it is left out"
    assert gone in site.apply("--size", "1")
    assert site.slurm.nodes_of("train") == "n[1-2],s3"
    assert gone in site.run("show")[1] and "would order" not in site.run("show")[1]
    assert gone in site.apply("--size", "0")
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


def test_what_changes_while_it_asks_is_asked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(question: str) -> bool:
        asked.append(question)
        if len(asked) == 1:
            site.slurm.nodes["s1"] = ("IDLE+DRAIN", "broken")
        return True

    monkeypatch.setattr(cli.flow, "confirm", confirm)
    code, text = site.run("apply", "--nodes", "s[1-3]", "--size", "1")
    assert code == 0 and len(asked) == 2 and "Slurm has changed meanwhile" in text
    assert site.slurm.nodes_of("standby") == "s2"


def test_dry_run_changes_nothing(site: Site) -> None:
    code, text = site.run("apply", "--dry-run", "--nodes", "s[1-3]", "--size", "1")
    assert code == 0 and text == "update PartitionName=standby Nodes=s1\n"
    assert site.slurm.orders == [] and not (site.state / "standby").exists()


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
    assert robust_status(["--nodes", "--state-dir", str(site.state)], site.slurm.door(), out) == 0
    line = next(one for one in out.getvalue().splitlines() if one.startswith("pool"))
    assert line.startswith("pool standby: 1 of 3 nodes free, 1 in use, 1 out of service; short 2")
    assert "oldest check" in line and " for " not in line  # since when, nobody has seen
    site.apply()
    out = io.StringIO()
    robust_status(["--nodes", "--state-dir", str(site.state)], site.slurm.door(), out)
    assert "; short 2 for " in out.getvalue()
    out = io.StringIO()
    robust_status(["--state-dir", str(site.state), "--json"], site.slurm.door(), out)
    assert json.loads(out.getvalue())["pool"]["short"] == 2
