"""Metrics: valid by the reference parsers, named by the conventions, bounded under lies."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from status_records import NOW, incident, roster

from robust_slurm.command_line.errors import CommandError
from robust_slurm.slurm import Slurm
from robust_slurm.slurm.run import Completed
from status.metrics.text import exposition
from status.metrics.textfile import collect, write_metrics
from status.source import RecordSource, demo
from status.web.serve import encoder

parser = pytest.importorskip("prometheus_client.parser")
openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")
ACCEPT = "application/openmetrics-text; version=1.0.0"
UNITS = (
    "seconds",
    "ratio",
    "total",
    "nodes",
    "info",
    "up",
    "jobs",
    "problems",
    "attention",
    "step",
    "steps",
    "records",
    "deaths",
)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter")
        for one in family.samples:
            key = one.name, tuple(sorted(one.labels.items()))
            assert key not in found
            found[key] = one.value
    return found


def test_the_sample_cluster_in_both_formats() -> None:
    with demo(NOW) as source:
        made, wrong = collect(source)
    assert not wrong
    told = samples(exposition(made))
    assert told["robust_slurm_jobs", (("state", "recovering"),)] == 1
    assert told["robust_slurm_pool_short_nodes", (("pool", "standby"),)] == 3
    key = (("cause", "node"), ("job_id", "118"), ("symptom", "crash"))
    assert told["robust_slurm_job_incidents_total", key] == 2
    assert 0.99 < told["robust_slurm_job_ettr_ratio", (("job_id", "118"),)] < 1
    assert ("robust_slurm_job_ettr_ratio", (("job_id", "109"),)) not in told  # it ended long ago
    for family in made:
        assert re.fullmatch(r"robust_slurm_[a-z_]+", family.name)
        assert family.name.endswith(UNITS) and family.help.endswith(".")
        assert family.name.endswith("_total") is (family.kind == "counter")
    encode = encoder()
    assert encode is not None
    body, kind = encode(made, ACCEPT)
    assert kind.startswith("application/openmetrics-text")
    strict = list(openmetrics.text_string_to_metric_families(body.decode()))
    assert sum(len(f.samples) for f in strict) == len(told)
    body, kind = encode(made, "")
    assert kind.startswith("text/plain") and samples(body.decode()) == told


def test_hostile_records_make_few_and_valid_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user can break no scrape of others: no series twice, no label of the user's choosing."""
    job = tmp_path / "jobs" / "7"
    job.mkdir(parents=True)
    evil = 'x"} 1\n# TYPE y counter\\ é'
    nodes = [{"name": f"n{n}", "role": f"role {n}", "ranks": []} for n in range(500)]
    for number in range(3):
        told = roster(job_name=evil, user=evil, nodes=nodes, step=10**18)
        (job / f"roster.{number}.json").write_text(json.dumps(told))
    for number in range(3, 90):
        (job / f"roster.{number}.json").write_text(
            json.dumps(roster(step_id=str(number), nodes=nodes))
        )
    monkeypatch.setattr("status.metrics.families.MOST_STEPS", 8)
    lines = [incident(symptom=f"s{n}", cause=f"c{n}") for n in range(500)]
    (job / "incidents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    down = Slurm(lambda *_: Completed(1, "", "down"), environ={})
    source = RecordSource(tmp_path, "standby", down, at=NOW)
    made, wrong = collect(source)
    told_ = samples(exposition(made))
    assert wrong and told_["robust_slurm_slurm_up", ()] == 0
    assert told_["robust_slurm_records_up", ()] == 1
    labels = {v for (name, of) in told_ for k, v in of if k in ("role", "cause", "symptom")}
    assert labels == {"other"}
    assert len(told_) < 60
    encode = encoder()
    assert encode is not None
    list(openmetrics.text_string_to_metric_families(encode(made, ACCEPT)[0].decode()))


def test_the_file_is_replaced_at_once(tmp_path: Path) -> None:
    file = tmp_path / "robust.prom"
    file.write_text("old")
    kept = file.open()
    with demo(NOW) as source:
        told_to = io.StringIO()
        assert write_metrics(file, source, told_to, as_json=True) == 0
        assert json.loads(told_to.getvalue())["complete"] is True
        with pytest.raises(CommandError, match="cannot write"):
            write_metrics(tmp_path / "no" / "x.prom", source, io.StringIO())
    assert kept.read() == "old"  # the old file itself was not written to
    assert samples(file.read_text()) and file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["robust.prom"]
