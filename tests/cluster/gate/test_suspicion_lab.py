"""A node's story by robust-status on a real Slurm: reported, cleared, withdrawn, undrained."""

from __future__ import annotations

import json
import re
from typing import Any

import gate_jobs
from gate_jobs import begin, finish, of, site_training
from gate_lab import FREE, GateLab
from waiting import until

from robust_slurm.state_dir.ledger import WITHDRAWN

made, site = gate_jobs.made, gate_jobs.site


def status(site: GateLab, *words: str, code: int = 0) -> str:
    """The output of robust-status, run by the unprivileged user."""
    argv = ["robust-status", "--state-dir", str(site.state), *words]
    done = site.lab.exec("head", argv, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def told(site: GateLab, node: str, job: int) -> tuple[str, list[str]]:
    """The heading and the lines, without their times, of what a job held against a node."""
    for part in status(site, node).split("\n\n")[1:]:
        head, *lines = part.rstrip("\n").split("\n")
        if head.startswith(f"suspected by job {job},"):
            stamp = r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
            assert all(re.match(stamp, line) for line in lines), part
            return head, [re.sub(stamp, "", line) for line in lines]
    raise AssertionError(f"no suspicion of {node} by job {job}")


def excluded(site: GateLab) -> str:
    """The list for sbatch, as $(…) gives it."""
    return status(site, "--lemons", "--format", "exclude").rstrip("\n")


def rule(site: GateLab, name: str) -> dict[str, Any]:
    rows = json.loads(status(site, "--rules", "--json"))["rules"]
    return next(row for row in rows if row["rule"] == name)


def test_reported_drained_by_its_job_cleared_and_undrained(site: GateLab) -> None:
    job = begin(site, "n1")
    site.report_node("n1", job, "0-1", symptom="hang", evidence=["rank 3 \x1b[31m"], rule="hang")
    reason = f"robust:node:hang:-:none:job{job}"  # as robust-srun drains with drain = direct
    site.drain("n1", reason)
    finish(site, job)
    assert len(of(site, "n1", job, "strike")) == 1
    assert reason in status(site, "n1")
    site.sweep("n1")
    site.wait_node("n1", *FREE)
    head, lines = told(site, "n1", job)
    assert head == f"suspected by job {job}, rule hang: cleared"
    assert lines == [
        f"job {job} of u reported n1: hang (rule hang, incident 0-1)",
        "evidence: rank 3 ?[31m",
        "the gate cleared n1: no check found a fault",
        f"strike: the report of job {job} is unproven and counts towards a lemon",
        f"undrained: every check passes on n1 ({reason})",
    ]
    row = rule(site, "hang")
    assert (row["reported"], row["cleared"], row["false_alarms"]) == (1, 1, 1)


def test_reported_drained_as_a_lemon_withdrawn_and_undrained(site: GateLab) -> None:
    site.settings(more="[lemon]\nstrikes = 1\nusers = 1\naccounts = 1\n")
    job = begin(site, "n3")
    site.report_node("n3", job, "0-1", symptom="crash", evidence=["exit code 1"], rule="signal")
    finish(site, job)
    reason = f"robust:node:lemon:-:service:job{job}"
    site.wait_reason("n3", reason)
    head, _ = told(site, "n3", job)
    assert head == f"suspected by job {job}, rule signal: cleared, drained"
    withdrawn = f"n3.0-1{WITHDRAWN}"
    site.report_node(
        "n3", job, f"0-1{WITHDRAWN.removesuffix('.json')}", incident="0-1", withdrawn="n1 too"
    )
    assert (site.state / "jobs" / str(job) / "accusations" / withdrawn).exists()
    site.sweep("n3")
    site.wait_node("n3", *FREE)
    head, lines = told(site, "n3", job)
    assert head == f"suspected by job {job}, rule signal: withdrawn"
    assert [line for line in lines if not line.startswith("evidence:")] == [
        f"job {job} of u reported n3: crash (rule signal, incident 0-1)",
        "the gate cleared n3: no check found a fault",
        f"strike: the report of job {job} is unproven and counts towards a lemon",
        f"drained: {reason}",
        f"job {job} withdrew the report: n1 too",
        f"the strike of job {job} counts no more: the report was withdrawn (n1 too)",
        f"undrained: every check passes on n3 ({reason})",
    ]
    assert rule(site, "signal")["withdrawn"] == 1


def test_robust_srun_takes_back_its_report_and_the_story_says_so(site: GateLab) -> None:
    """The replacement shows the same error: the program, its data or a shared service."""
    training = site_training(site)
    toy = ["--fault", "ecc", "--at", "8", "--epoch", "1,2", "--save", "100"]
    training.submit(training.line(["--robust-spares=1"], toy), ["-N3", "--ntasks-per-node=1"])
    training.check_done()
    site.ended(training.job)
    assert set(training.withdrawals()) == {"n2"}

    def dealt_with() -> bool:  # the epilog of a node that left may look before or after
        site.sweep("n2")
        return len(of(site, "n2", training.job, "strike")) == len(
            of(site, "n2", training.job, "withdrawn")
        )

    until(dealt_with, "no strike against n2 counts")
    head, lines = told(site, "n2", training.job)
    assert head == f"suspected by job {training.job}, rule machine-error: withdrawn"
    text = "\n".join(lines)
    assert f"job {training.job} evicted n2; n3 took its ranks" in text
    assert f"job {training.job} withdrew the report: the same error on n2, n3" in text
    row = rule(site, "machine-error")
    assert (row["withdrawn"], row["false_alarms"], row["false_share"]) == (1, 1, 1.0)
    assert excluded(site) == ""
    lemon = next(
        row
        for row in json.loads(status(site, "--lemons", "--json"))["nodes"]
        if row["name"] == "n2"
    )
    assert (lemon["jobs"], lemon["withdrawn"], lemon["exclude"]) == (0, 1, False)


def test_two_jobs_that_go_on_without_a_node_put_it_on_their_users_list(site: GateLab) -> None:
    for _ in range(2):
        training = site_training(site)
        line = training.line(["--robust-spares=1"], ["--fault", "ecc", "--at", "8"])
        training.submit(line, ["-N3", "--ntasks-per-node=1"])
        training.check_done()
        site.ended(training.job)
        assert set(training.accusations()) == {"n2"} and not training.withdrawals()
    assert excluded(site) == "n2"
    record = site.ended(site.submit("-N2", f"--exclude={excluded(site)}"))
    assert (record["JobState"], record["NodeList"]) == ("COMPLETED", "n[1,3]")
    site.repaired("n2")
    site.sweep("n2")  # brings a person's word to the shared record
    assert excluded(site) == ""
    record = site.ended(site.submit("-N3", f"--exclude={excluded(site)}"))
    assert (record["JobState"], record["NodeList"]) == ("COMPLETED", "n[1-3]")


def test_a_node_that_slurm_does_not_know(site: GateLab) -> None:
    assert status(site, "n77", code=1) == ""
