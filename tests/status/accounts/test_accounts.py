"""Accounts: every millisecond of a job is counted once, and every sum agrees with every other."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from status_records import NOW, incident, roster, view

from robust_slurm.slurm import Slurm
from robust_slurm.slurm.run import Completed
from robust_slurm.state_dir.progress import JobRun, progress_from
from robust_slurm.state_dir.records import IncidentRecord, incident_from, roster_from
from status.accounts.gather import history, read_histories, with_spans
from status.accounts.segments import INCIDENT_PHASES, PHASES, TRAINING
from status.accounts.sums import SHARES, curve, ettr, lost, since, total, unproductive
from status.accounts.timeline import JobAccount, JobHistory, account, ms
from status.accounts.weeks import weekly
from status.views.accounts import print_accounts

T = NOW - 10_000


def failed(at: float, phases: dict[str, float], **changes: Any) -> IncidentRecord:
    """An incident that begins ``at`` seconds after T: detected when ``detect`` has passed."""
    full = {**phases, "total": sum(phases.values())}
    made = incident_from(incident(time=T + at + phases.get("detect", 0.0), phases=full, **changes))
    assert made is not None
    return made


def of(runs: list[JobRun], incidents: list[IncidentRecord], **more: Any) -> JobAccount:
    told = JobHistory(7, "llm", "ada", 1000, False, runs, incidents, step_time=2.0, **more)
    return account(told, NOW)


def run_of(start: float, end: float, first: float | None = None, gpus: int = 8) -> JobRun:
    when = None if first is None else T + first
    return JobRun(T + start, "0", "train", gpus, gpus, when, T + end, "completed")


def phases(of: JobAccount) -> dict[str, int]:
    return {row.name: row.ms for row in lost([of], SHARES["phase"])}


def test_an_incident_costs_its_phases_and_the_steps_done_twice() -> None:
    spent = {"detect": 2.5, "decide": 0.1, "stop": 1.0, "restore": 3.0, "first_step": 4.0}
    done = of([run_of(0, 1000, 60)], [failed(500, spent, lost_steps=3)])
    want = {"start_up": 60_000, **{k: ms(v) for k, v in spent.items()}, "redone": 6000}
    assert phases(done) == want
    assert unproductive(done) == sum(want.values())
    assert ettr(done) == 1 - sum(want.values()) / 1_000_000
    assert {row.name: row.gpu_ms for row in lost([done], SHARES["node"])} == {
        "n2": 8 * (sum(want.values()) - 60_000),
        "(no node)": 8 * 60_000,
    }


def test_a_job_whose_steps_are_not_seen_is_taken_to_train_and_marked() -> None:
    run = run_of(0, 1000)
    assert phases(of([run], [])) == {"start_up": 1_000_000}  # an older record knows no more
    run.launched = T + 20
    whole = of([run], [])
    assert phases(whole) == {"start_up": 20_000} and whole.estimated
    spent = {"stop": 5.0, "launch": 5.0}
    guess = {"steps_seen": False, "lost_steps": None, "lost_s": 100.0, "estimate": "newest file"}
    hit = of([run], [failed(500, spent, **guess)])
    assert phases(hit) == {"start_up": 20_000, "stop": 5000, "launch": 5000, "redone": 100_000}
    assert hit.estimated and any("no step of the program is seen" in note for note in hit.notes)
    early = of([run], [failed(500, spent, outcome="gave up", **guess)])
    assert "start_up" in phases(early) and not whole.live


def test_time_in_the_queue_is_charged_to_the_incident_that_requeued() -> None:
    spent = {"detect": 5.0, "stop": 5.0}
    runs = [run_of(0, 100, 10), run_of(250, 400, 300)]
    done = of(runs, [failed(80, spent, outcome="requeued", lost_steps=None, swaps=[])])
    assert phases(done) == {
        "start_up": 60_000, "detect": 5000, "stop": 5000, "ending": 10_000, "queued": 150_000,
    }  # fmt: skip
    causes = {row.name: row.ms for row in lost([done], SHARES["cause"])}
    assert causes == {"node": 50_000 + 20_000 + 150_000, "start": 10_000}


def test_sacct_adds_the_script_around_robust_srun() -> None:
    spans = [(T - 20, T + 110), (T + 230, None)]
    done = of([run_of(0, 100, 10), run_of(250, 400, 300)], [], spans=spans)
    assert phases(done)["script"] == ms(20 + 10 + 20 + (NOW - T - 400))
    assert phases(done)["queued"] == 120_000
    assert done.elapsed == ms(NOW - (T - 20))


@pytest.mark.parametrize("outcome", ["warned", "observed: would restart in place"])
def test_what_stopped_no_rank_costs_nothing(outcome: str) -> None:
    done = of([run_of(0, 100, 0)], [failed(50, {"detect": 20.0}, outcome=outcome)])
    assert unproductive(done) == 0


def test_an_older_record_still_adds_up_to_what_its_roster_says() -> None:
    told = roster_from(roster(updated=NOW - 100, lost_steps=3, unproductive_s=30.0))
    hit = incident_from(incident(time=NOW - 200, phases={"detect": 2.0, "total": 5.5}))
    assert told is not None and hit is not None
    made = history(7, "ada", 1, [told], [hit], [], view(), NOW)
    assert made is not None
    assert unproductive(account(made, NOW)) == 30_000


def test_sacct_is_read_and_its_absence_is_said() -> None:
    told = JobHistory(7, "", "", 1, False, [run_of(0, 1)], [])
    text = "7|1700000000|1700000100\n7|1700000300|Unknown\n8|None|Unknown\n"
    (found,), why = with_spans([told], Slurm(lambda *_: Completed(0, text, ""), environ={}))
    assert not why
    assert found.spans == [(1.7e9, 1.7e9 + 100), (1.7e9 + 300, None)]
    gone = Slurm(lambda *_: Completed(1, "", "Slurm accounting storage is disabled"), environ={})
    assert "no times of sacct" in with_spans([told], gone)[1]


# -- the property: nothing is lost, and nothing is counted twice -------------------------------

seconds = st.integers(0, 4000).map(lambda n: n / 1000)
spent = st.fixed_dictionaries(dict.fromkeys(INCIDENT_PHASES, seconds))
incidents_ = st.lists(
    st.tuples(
        st.integers(0, 90_000).map(lambda n: n / 1000),
        spent,
        st.sampled_from(["recovered", "requeued", "gave up", "warned"]),
        st.sampled_from(["node", "user", "shared", ""]),
        st.lists(st.sampled_from(["n1", "n2", "n3"]), max_size=3, unique=True),
        st.none() | st.integers(0, 3),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 70)), min_size=1,
             max_size=3),
    incidents_,
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 100)), max_size=3),
    st.integers(0, 200_000),
)  # fmt: skip
def test_every_sum_reconciles_to_the_millisecond(
    runs: list[tuple[int, int, int]],
    hits: list[tuple[float, dict[str, float], str, str, list[str], int | None]],
    spans: list[tuple[int, int]],
    cut: int,
) -> None:
    made, at = [], 0
    for gap, long, first in runs:
        made.append(run_of(at + gap, at + gap + long, min(first, long) + at + gap))
        at += gap + long
    told = [
        failed(at, phases, outcome=outcome, cause=cause, suspects=nodes, swaps=[], lost_steps=lost)
        for at, phases, outcome, cause, nodes, lost in hits
    ]
    done = of(made, told, spans=[(T + start, T + start + long) for start, long in spans])
    # The segments cover the job's time, without gap or overlap.
    edges = [(s.begin, s.end) for s in done.segments]
    assert [b for b, _ in edges] == [done.begin, *(e for _, e in edges)][: len(edges)]
    assert sum(s.ms for s in done.segments) == done.elapsed
    assert {s.phase for s in done.segments} <= set(PHASES)
    # Slurm's time and the queue's are all of it: what sacct says is neither lost nor exceeded.
    ran = sum(s.ms for s in done.segments if s.phase != "queued")
    covered = {t for b, long in spans for t in range(b, b + long)}
    covered |= {t for run in made for t in range(int(run.started - T), int((run.ended or 0) - T))}
    if spans:
        assert ran == 1000 * len(covered)
    # All breakdowns have the same sums, in time and in GPU time; windows add up to the whole.
    whole = total([done])
    assert whole.unproductive == unproductive(done)
    for share in SHARES.values():
        rows = lost([done], share)
        assert sum(row.ms for row in rows) == whole.unproductive
        assert sum(row.gpu_ms for row in rows) == whole.lost_gpu_ms
    middle = done.begin + cut
    parts = [since(done, done.begin, middle), since(done, middle, done.end)]
    assert sum(unproductive(part) for part in parts if part) == whole.unproductive
    # An incident alone in its time costs what incidents.jsonl says, phase by phase.
    for number, one in enumerate(told):
        mine = [s for s in done.segments if s.incident == done.incidents.index(one)]
        cost: dict[str, int] = {}
        for s in mine:
            cost[s.phase] = cost.get(s.phase, 0) + s.ms
        recorded = {p: ms(one.phases[p]) for p in INCIDENT_PHASES}
        assert all(cost.get(p, 0) <= recorded[p] + 1 for p in INCIDENT_PHASES)
        if one.outcome == "recovered" and _alone(one, number, told, made):
            again = 1000 * 2 * (one.lost_steps or 0)
            assert {p: cost.get(p, 0) for p in INCIDENT_PHASES} == recorded
            assert cost.get("redone", 0) == again
    # The curve ends at the ETTR of the whole.
    shown = curve(done)
    if shown.at:
        assert shown.cumulative[-1] == pytest.approx(ettr(done), abs=1e-12)
        assert all(0 <= v <= 1 for v in (*shown.cumulative, *shown.sliding))


def _alone(
    one: IncidentRecord, number: int, told: list[IncidentRecord], runs: list[JobRun]
) -> bool:
    """True if nothing else happens in the time of an incident, and a run contains it."""

    def reach(i: IncidentRecord) -> tuple[float, float]:
        begin = i.time - i.phases["detect"]
        again = 1e9 if i.outcome in ("requeued", "gave up") else 2.0 * (i.lost_steps or 0)
        return begin, begin + i.phases["total"] + again

    begin, end = reach(one)
    others = [reach(i) for n, i in enumerate(told) if n != number and i.outcome != "warned"]
    if any(b <= end and begin <= e for b, e in others):
        return False
    return any(
        (run.first_step or 0) <= begin and run.started <= begin - 2 and end <= (run.ended or 0)
        for run in runs
    )


def test_progress_is_read_without_trust() -> None:
    lines: list[object] = [
        {"kind": "run", "time": 1.0, "step_id": "0", "gpus": 8, "partition": "train"},
        {"kind": "world", "time": 2.0, "step_id": "0", "ranks": 8,
         "places": {"0": "n1 0-7", "x": "n2 0", "1": 5}},
        {"kind": "first", "time": 3.0, "step_id": "0"},
        {"kind": "point", "time": 4.0, "step_id": "0", "step": 5, "s": "x", "loss": 1e999},
        {"kind": "point", "time": 4.0, "step_id": "9"},
        {"kind": "end", "time": float("nan"), "step_id": "0"},
        [], 7, None,
    ]  # fmt: skip
    raw = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n{torn"
    (run,) = progress_from(raw)
    assert (run.gpus, run.ranks, run.first_step, run.ended) == (8, 8, 3.0, None)
    assert [(p.step, p.step_time_s, p.loss) for p in run.points] == [(5, None, None)]
    assert run.placings[0].places == {0: ("n1", "0-7")}
    assert TRAINING in PHASES


def test_hostile_records_are_bounded(tmp_path: Path) -> None:
    """A user's files cost other readers no more time and memory than a large job's."""
    job = tmp_path / "jobs" / "7"
    job.mkdir(parents=True)
    run = json.dumps({"kind": "run", "time": T, "step_id": "0"}) + "\n"
    point = json.dumps({"kind": "point", "time": T + 1, "step_id": "0", "s": 0.1}) + "\n"
    world = {
        "kind": "world",
        "time": T,
        "step_id": "0",
        "places": {str(n): "n 0" for n in range(9000)},
    }
    text = run * 3000 + (json.dumps(world) + "\n") * 5 + point * 20_000
    (job / "progress.jsonl").write_text(text)
    hit = json.dumps(incident(time=T + 5, lost_steps=10**12)) + "\n"
    (job / "incidents.jsonl").write_text(hit * 5000)
    (made,), problems = read_histories(tmp_path, view(), NOW)
    assert problems == [f"{job}/incidents.jsonl: only the newest 1000 incidents were read"]
    assert len(made.runs) <= 200 and len(made.incidents) == 1000
    assert sum(len(r.points) for r in made.runs) <= 1002
    done = account(made, NOW)
    assert len(done.segments) < 20_000
    assert sum(s.ms for s in done.segments) == done.elapsed


def test_one_users_times_spoil_no_sum_of_all(tmp_path: Path) -> None:
    for job, when in enumerate((9.9e14, -9.9e14, 1e12, T), 1):
        home = tmp_path / "jobs" / str(job)
        home.mkdir(parents=True)
        run = {"kind": "run", "time": when, "step_id": "0", "gpus": 1 << 62}
        end = {"kind": "end", "time": when, "step_id": "0", "state": "completed"}
        (home / "progress.jsonl").write_text(f"{json.dumps(run)}\n{json.dumps(end)}\n")
        (home / "incidents.jsonl").write_text(json.dumps(incident(time=when)) + "\n")
    found, _ = read_histories(tmp_path, view(), NOW)
    done = [account(one, NOW) for one in found]
    assert [one.job_id for one in done] == [4] and done[0].gpus <= 1_000_000
    assert len(weekly(done)) <= 1


def test_a_screen_of_any_width_shows_each_job() -> None:
    done = [of([run_of(0, 900_000, 0)], [])]
    for width in (40, 80, 200):
        screen = Console(file=io.StringIO(), width=width, force_terminal=False)
        print_accounts(done, None, [], "", screen)
        lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert "LOST BY NODE" not in screen.file.getvalue()  # type: ignore[attr-defined]
        row = next(line for line in lines if line.startswith("7 "))
        assert row.split()[-1] == "1.0000" and ("llm" in row) is (width > 100)


def test_missing_ranks_are_the_missing_share_of_the_time() -> None:
    """3 of 4 for 300 s, then 2 of 4 for 100 s, then all again; an incident in it counts once."""
    run = run_of(0, 1000, 0)
    run.sizes = [(T + 100, 3, 4), (T + 400, 2, 4), (T + 500, 1, 1)]
    done = of([run], [failed(200, {"detect": 4.0, "stop": 6.0}, lost_steps=0)])
    assert phases(done) == {"detect": 4000, "stop": 6000, "degraded": 290_000 // 4 + 50_000}
    assert sum(s.ms for s in done.segments) == 1_000_000
    assert {r.name: r.ms for r in lost([done], SHARES["cause"])}["resized"] == 122_500
    # As it goes, not all at the end: the curve of ETTR shows when.
    part = since(done, ms(T + 220), ms(T + 280))
    assert part is not None and abs(unproductive(part) - 15_000) < 16_000


def test_missing_ranks_of_a_step_count_by_its_gpus_when_another_runs_beside_it() -> None:
    """The later step's sizes replaced those of the earlier, whose missing ranks then trained."""
    both = [run_of(0, 1000, 0), run_of(10, 1000, 10)]
    for shrunk in both:
        one, other = both
        one.sizes, other.sizes = [], []
        shrunk.sizes = [(T + 100, 3, 4), (T + 500, 1, 1)]
        assert phases(of(both, []))["degraded"] == 400_000 // 8
    both[0].sizes = both[1].sizes
    assert phases(of(both, []))["degraded"] == 400_000 // 4


def test_sizes_of_a_record_that_somebody_has_written_cost_little() -> None:
    """Thousands of them and of incidents; out of order they count all the same."""
    run = run_of(0, 10_000, 0)
    run.sizes = [(T + 9000 - n, 3 + n % 2, 5) for n in range(8000)]
    began = time.process_time()
    done = of([run], [failed(n, {"detect": 0.1}, lost_steps=0) for n in range(1000, 9000, 2)])
    assert time.process_time() - began < 5.0
    assert sum(s.ms for s in done.segments) == 10_000_000
    assert 2_600_000 < phases(done)["degraded"] < 2_700_000


def test_sizes_are_read_without_trust() -> None:
    lines = [
        {"kind": "run", "time": 1.0, "step_id": "0", "ranks": 4},
        {"kind": "world", "time": 2.0, "step_id": "0", "ranks": 3, "trains": 3, "of": 4},
        {"kind": "world", "time": 3.0, "step_id": "0", "ranks": 3, "trains": "x", "of": -1},
        {"kind": "world", "time": 4.0, "step_id": "0", "ranks": 4},
    ]
    (run,) = progress_from("\n".join(map(json.dumps, lines)).encode())
    assert (run.sizes, run.ranks) == ([(2.0, 3, 4), (3.0, 1, 1), (4.0, 1, 1)], 4)
