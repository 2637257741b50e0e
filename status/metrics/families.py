"""The metrics of a cluster, as families of samples. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from srun_wrapper.decide.diagnosis import SYMPTOMS
from status.accounts.sums import curve, ettr
from status.accounts.timeline import JobAccount
from status.model import JobRow
from status.show import Cluster
from status.views.overview import node_word

MOST_STEPS = 2000  # live steps with series of their own, the newest jobs first
AFTER_END = 3600.0  # s that a job's counters are shown after it has ended
# Users write the records: only words that we know become labels, or one job makes a million series.
ROLES = ("active", "spare", "dead", "evicted", "released", "too late")
CAUSES = ("node", "shared", "user", "transient", "unknown", "ordered", "start", "script", "queue")


def known(word: object, words: Sequence[str]) -> str:
    return word if isinstance(word, str) and word in words else "other"


@dataclass
class Family:
    """One metric. ``kind``: gauge or counter; a counter's name ends in _total."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], float] = field(default_factory=dict)

    def add(self, value: float | None, *labels: object) -> None:
        """Add a sample; a second one with equal labels is dropped: scrapers reject duplicates."""
        if value is not None:
            self.samples.setdefault(tuple(map(str, labels)), float(value))


def families(found: Cluster, accounts: Sequence[JobAccount], now: float) -> list[Family]:
    """All metrics; those without a sample are left out."""
    made = [*_cluster(found, now), *_jobs(found), *_accounts(accounts, now)]
    return [family for family in made if family.samples]


def _cluster(found: Cluster, now: float) -> Iterable[Family]:
    report, p = found.report, "robust_slurm_"
    family = Family(p + "slurm_up", "gauge", "1 if slurmctld answered.")
    family.add(not report.slurm_error)
    yield family
    family = Family(p + "records_up", "gauge", "1 if the jobs' records can be read.")
    family.add(not found.wrong)
    yield family
    text = "Records that could not be read; robust-status names them."
    family = Family(p + "problems", "gauge", text)
    family.add(len(report.problems))
    yield family
    text = "Time at which these metrics were collected."
    family = Family(p + "collected_timestamp_seconds", "gauge", text)
    family.add(now)
    yield family
    family = Family(p + "nodes", "gauge", "Nodes by pool and state.", ("pool", "state"))
    for (partition, word), count in sorted(
        Counter((r.pool, node_word(r)) for r in report.nodes).items()
    ):
        family.add(count, partition, word)
    yield family
    text = "1 for each node that needs a look: bad, suspected by a job, or flapping."
    family = Family(p + "node_attention", "gauge", text, ("node", "kind"))
    for one in found.look:
        if one.kind in ("bad", "suspected", "flapping"):
            family.add(1, one.name, one.kind)
    yield family
    text = "Nodes of the standby pool by state."
    family = Family(p + "pool_nodes", "gauge", text, ("pool", "state"))
    short = Family(p + "pool_short_nodes", "gauge", "Standby nodes that are missing.", ("pool",))
    if (pool := report.pool) is not None:
        counts = {"free": pool.free, "in_use": pool.in_use, "out": pool.out}
        for word, count in counts.items():
            family.add(count, pool.partition, word)
        short.add(pool.short, pool.partition)
    yield family
    yield short


def _jobs(found: Cluster) -> Iterable[Family]:
    p, job = "robust_slurm_job_", ("job_id", "step_id")
    rows = [row for row in found.report.jobs if row.live]
    family = Family("robust_slurm_jobs", "gauge", "Live jobs of robust-srun by state.", ("state",))
    for word, count in sorted(Counter(row.status for row in rows).items()):
        family.add(count, word)
    yield family
    info = Family(p + "info", "gauge", "1 for each live job.", (*job, "name", "user", "state"))
    step = Family(p + "training_step", "gauge", "Newest training step.", job)
    seconds = Family(p + "step_time_seconds", "gauge", "Median time of a training step.", job)
    text = "Time of the newest report of robust-srun."
    heard = Family(p + "last_report_timestamp_seconds", "gauge", text, job)
    nodes = Family(p + "nodes", "gauge", "Nodes of the job by role.", (*job, "role"))
    for row in rows[:MOST_STEPS]:
        of = (row.job_id, row.step_id)
        info.add(1, *of, row.name, row.user, row.status)
        step.add(row.step, *of)
        seconds.add(row.step_time_s, *of)
        heard.add(row.updated, *of)
        for role, count in sorted(
            Counter(known(node["role"], ROLES) for node in row.nodes).items()
        ):
            nodes.add(count, *of, role)
    yield from (info, step, seconds, heard, nodes)
    yield from _data(rows[:MOST_STEPS])


def _data(rows: Sequence[JobRow]) -> Iterable[Family]:
    """Yield metrics of live jobs' data; sums over the sources only, since users name those."""
    p, job = "robust_slurm_job_data_", ("job_id", "step_id")
    text = "Part of the last minute that ranks waited for data, on average."
    waited = Family(p + "wait_ratio", "gauge", text, job)
    text = "Steps that are made ahead, on the node with fewest."
    ahead = Family(p + "ahead_steps", "gauge", text, job)
    text = "Bad records that the data processes have skipped since they began."
    skipped = Family(p + "skipped_records", "gauge", text, job)
    text = "Data processes that have died so far."
    deaths = Family(p + "process_deaths", "gauge", text, job)
    for row in rows:
        if (data := row.data) is None:
            continue
        of = (row.job_id, row.step_id)
        waited.add(data.waited_s / data.window_s if data.window_s > 0 else None, *of)
        if data.processes:
            ahead.add(data.ahead_least, *of)
            skipped.add(sum(source.skipped for source in data.sources), *of)
        deaths.add(data.deaths, *of)
    yield from (waited, ahead, skipped, deaths)


def _accounts(accounts: Sequence[JobAccount], now: float) -> Iterable[Family]:
    p, job = "robust_slurm_job_", ("job_id",)
    whole = Family(p + "ettr_ratio", "gauge", "Effective training time ratio so far.", job)
    text = "Effective training time ratio of the last hour."
    last = Family(p + "ettr_last_hour_ratio", "gauge", text, job)
    labels = (*job, "symptom", "cause")
    hits = Family(p + "incidents_total", "counter", "Incidents of the job.", labels)
    labels = (*job, "phase", "cause")
    text = "Time without new steps, by phase and cause."
    spent = Family(p + "unproductive_seconds_total", "counter", text, labels)
    text = "GPU time without new steps, by phase and cause."
    gone = Family(p + "lost_gpu_seconds_total", "counter", text, labels)
    total = Family(p + "gpu_seconds_total", "counter", "GPU time of the job.", job)
    for one in accounts:
        if not one.live and now - one.end / 1000 > AFTER_END:
            continue
        shown = curve(one, points=1)
        whole.add(ettr(one), one.job_id)
        last.add(shown.sliding[-1] if shown.sliding and one.live else None, one.job_id)
        total.add(sum(s.gpu_ms for s in one.segments) / 1000, one.job_id)
        for (symptom, cause), count in sorted(
            Counter(
                (known(i.symptom, SYMPTOMS), known(i.cause, CAUSES)) for i in one.incidents
            ).items()
        ):
            hits.add(count, one.job_id, symptom, cause)
        times: dict[tuple[str, str], list[int]] = {}
        for s in one.segments:
            if not s.productive:
                entry = times.setdefault((s.phase, known(s.cause, CAUSES)), [0, 0])
                entry[0] += s.ms
                entry[1] += s.gpu_ms
        for (phase, cause), (ms, gpu_ms) in sorted(times.items()):
            spent.add(ms / 1000, one.job_id, phase, cause)
            gone.add(gpu_ms / 1000, one.job_id, phase, cause)
    yield from (whole, last, hits, spent, gone, total)
