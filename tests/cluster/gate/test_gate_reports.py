"""A user's accusations of a node, on a real Slurm: followed up, cleared, or refused."""

from __future__ import annotations

import os
from typing import Any

import gate_jobs
from gate_jobs import WAITS, begin, finish, of, site_training
from gate_lab import FREE, GateLab
from rival import RIVAL, add_rival, run_as
from waiting import until

from lab.spec import UID

REJECTED = "rejected"
STRANGER = 30001  # a uid that is nobody's here
TEST = "#!/bin/sh\necho {words}\nexit {code}\n"


made, site = gate_jobs.made, gate_jobs.site


def deeper_tests(site: GateLab, words: str, code: int, lemon: str = "strikes = 100") -> None:
    path = site.etc / "deeper"
    path.unlink(missing_ok=True)
    path.write_text(TEST.format(words=words, code=code))
    path.chmod(0o755)
    tests = f'[accusations]\ntests = ["{path}"]\n'
    site.settings(more=f"{tests}[lemon]\n{lemon}\n")


def outcome(site: GateLab, node: str, job: int) -> str:
    (event,) = of(site, node, job, "accusation")
    return str(event.data["result"])


def sweep_until_followed_up(site: GateLab, node: str, job: int) -> None:
    """Sweep again and again, as slurmd does.

    The epilog of a node that left a running job is nobody's to wait for: it may have looked
    before the accusation was written, and still have the right to look while a sweep wants it.
    """

    def followed_up() -> bool:
        if not of(site, node, job, "accusation"):
            site.sweep(node)
        return bool(of(site, node, job, "accusation"))

    until(followed_up, f"accusation of {node} followed up")


def test_a_false_one_is_cleared_with_a_strike(site: GateLab) -> None:
    deeper_tests(site, "all well", 0)
    job = begin(site, "n1")
    site.report_node("n1", job, symptom="hang", evidence=["rank 3 \x1b[31m stands still"])
    finish(site, job)
    assert site.node("n1") == FREE
    (event,) = of(site, "n1", job, "accusation")
    assert event.data["result"] == "cleared" and event.data["check"] == "hang"
    assert event.data["said"] == ["rank 3 ?[31m stands still"]
    assert "1 tests of [accusations] were run" in event.data["why"]
    (strike,) = of(site, "n1", job, "strike")
    assert strike.data["uid"] == site.lab.uid
    assert strike in site.shared("n1", "strike")
    site.sweep("n1")  # it was dealt with
    assert len(of(site, "n1", job, "accusation")) == 1


def test_a_true_one_drains_with_the_evidence(site: GateLab) -> None:
    deeper_tests(site, "NCCL loopback at 3 GB/s", 1)
    job = begin(site, "n1")
    site.report_node("n1", job)
    finish(site, job)
    assert site.reason("n1") == f"robust:node:accusation-test:-:service:job{job}"
    assert outcome(site, "n1", job) == "confirmed"
    assert of(site, "n1", job, "strike") == []
    (drain,) = of(site, "n1", job, "drain")
    assert "NCCL loopback at 3 GB/s" in drain.data["evidence"]
    site.sweep("n1")
    assert site.reason("n1"), "only a person's word takes that back"
    site.repaired("n1")
    site.sweep("n1")
    site.wait_node("n1", *FREE)


def strike(site: GateLab, node: str, uid: int, account: str) -> int:
    """A job of this user and account accuses its node, whose deeper tests find nothing."""
    home = site.lab.shared / f"home-{uid}"
    if not home.exists():
        home.mkdir()
        os.chown(home, uid, uid)
    sbatch = ["sbatch", "--parsable", "-o", "/dev/null", f"-w{node}", f"--account={account}"]
    submitted = run_as(site.lab, uid, home, sbatch, WAITS)
    assert submitted.returncode == 0, submitted
    job = int(submitted.stdout)
    until((home / f"{job}.started").exists, f"job {job} running")
    site.report_node(node, job)
    argv = ["chown", "-R", f"{uid}:{uid}", str(site.state / "jobs" / str(job))]
    site.lab.exec("head", argv, user=False, check=True)
    (home / f"{job}.end").touch()
    site.ended(job)
    (event,) = of(site, node, job, "strike")
    assert (event.data["uid"], event.data["account"]) == (uid, account)
    return job


def test_a_lemon_needs_strikes_of_two_users_and_two_accounts(site: GateLab) -> None:
    deeper_tests(site, "all well", 0, "strikes = 3")
    add_rival(site.lab)
    own = site.lab.uid
    for uid, account in ((own, "red"), (own, "blue"), (own, "blue"), (own, "red")):
        strike(site, "n3", uid, account)
        assert site.node("n3") == FREE  # one user, however many accounts it has
    job = strike(site, "n3", RIVAL, "red")
    assert site.reason("n3") == f"robust:node:lemon:-:service:job{job}"
    site.repaired("n3")
    site.sweep("n3")
    site.wait_node("n3", *FREE)
    for uid in (own, RIVAL, RIVAL, own):
        strike(site, "n3", uid, "red")
        assert site.node("n3") == FREE  # two users, but one account: a group's own program
    job = strike(site, "n3", RIVAL, "blue")
    assert site.reason("n3") == f"robust:node:lemon:-:service:job{job}"
    site.repaired("n3")
    site.sweep("n3")
    site.wait_node("n3", *FREE)


def test_a_late_one_is_the_sweeps(site: GateLab) -> None:
    job = begin(site, "n2")
    finish(site, job)
    site.report_node("n2", job)
    site.sweep("n2")
    assert outcome(site, "n2", job) == "cleared"
    assert len(of(site, "n2", job, "strike")) == 1


# By incident: what is done to the record, why it is refused, and whose the file is.
REFUSED: dict[str, tuple[dict[str, Any], str, int]] = {
    "e1": ({"owner": STRANGER}, f"belongs to uid {STRANGER}", STRANGER),
    "e2": ({"job": 1}, "not of job", UID),
    "e3": ({"node": "n1"}, "about another node", UID),
    "e4": ({"text": "[" * 30000}, "not valid JSON", UID),
    "e5": ({"text": "x" * 70000}, "larger than", UID),
    "e6": ({"link": "/etc/passwd"}, "a link", UID),
}


def test_forged_ones_are_refused(site: GateLab) -> None:
    deeper_tests(site, "never to be run", 1)
    job = begin(site, "n2")
    for incident, (how, _, _) in REFUSED.items():
        site.report_node("n2", job, incident, **how)
    finish(site, job)
    assert site.node("n2") == FREE
    said = {e.data["name"]: (e.data["why"], e.data["owner"]) for e in of(site, "n2", job, REJECTED)}
    assert set(said) == {f"n2.{incident}.json" for incident in REFUSED}
    for incident, (_, why, owner) in REFUSED.items():
        text, uid = said[f"n2.{incident}.json"]
        assert why in text and uid == owner
    assert of(site, "n2", job, "accusation") == of(site, "n2", job, "strike") == []
    site.sweep("n2")  # once is enough
    assert len(of(site, "n2", job, REJECTED)) == len(REFUSED)


def test_a_node_where_the_job_never_was(site: GateLab) -> None:
    deeper_tests(site, "never to be run", 1)
    site.run("n3")
    job = begin(site, "n2")
    site.report_node("n3", job)
    finish(site, job)
    site.sweep("n3")
    assert site.node("n3") == FREE
    assert of(site, "n3", job, "accusation") == of(site, "n3", job, "strike") == []


def test_robust_srun_reports_and_the_gate_decides(site: GateLab) -> None:
    training = site_training(site)
    line = training.line(["--robust-spares=1"], ["--fault", "ecc", "--at", "8"])
    training.submit(line, ["-N3", "--ntasks-per-node=1"])
    training.check_done()
    site.ended(training.job)
    (record,) = training.accusations().values()
    assert record["node"] == "n2"
    sweep_until_followed_up(site, "n2", training.job)
    assert outcome(site, "n2", training.job) == "cleared"
    (event,) = of(site, "n2", training.job, "accusation")
    assert event.data["said"] == record["evidence"]
    assert len(of(site, "n2", training.job, "strike")) == 1
    assert site.others() == {}
