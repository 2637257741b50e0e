"""bench.scheduling: the command, and the records that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scheduling_records import FULL, OLD, incident, record

from bench.scheduling import __main__ as scheduling
from bench.scheduling.model import (
    STRATEGIES,
)

ORDERS = {"supervisor.start_orders_s": {"median": 0.25, "p95": 0.5, "n": 20}}


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of records with one of bench.heartbeat."""
    directory = tmp_path / "records"
    directory.mkdir()
    monkeypatch.setattr(scheduling, "RECORDS", directory)
    (directory / "heartbeat-2026-01-02.json").write_text(json.dumps({"metrics": ORDERS}))
    return directory


def written(tmp_path: Path, metrics: object = FULL, **more: object) -> Path:
    path = tmp_path / "recovery.json"
    path.write_text(json.dumps({"benchmark": "recovery", "metrics": metrics, **more}))
    return path


def run(tmp_path: Path, *argv: str) -> dict[str, dict[str, dict[str, float]]]:
    out = tmp_path / "out.json"
    assert scheduling.main(["--json", str(out), *argv]) == 0
    return dict(json.loads(out.read_text()))


@pytest.mark.usefixtures("records")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovery = str(written(tmp_path, machine={"cores": 2}))
    image = tmp_path / "plot.svg"
    found = run(tmp_path, "--recovery", recovery, "--plot", str(image))
    assert found["settings"]["pools"] == "128: 2, 256: 2, 512: 3, 1024: 4"
    assert str(found["settings"]["measured_1"]).startswith("recovery.json (cores 2): ")
    assert "reinstall 0 s" in str(found["settings"]["assumed"])
    for machines in (128, 256, 512, 1024):
        was = {s: found["metrics"][f"was_{machines}.{s}_s"]["median"] for s in STRATEGIES}
        assert sorted(was.values()) == [was[s] for s in STRATEGIES]
        swap = 0.5 + 0.25 * machines / 1250
        assert was["ours_spare"] == pytest.approx(0.99 * swap + 0.01 * 152.1)
        ratio = found["ratios"][f"was_{machines}.requeue/ours_spare"]
        assert ratio == pytest.approx(was["requeue"] / was["ours_spare"])
    assert ElementTree.parse(image).getroot().tag.endswith("svg")
    assert "was_1024.ours_standby_s" in capsys.readouterr().out


@pytest.mark.usefixtures("records")
def test_over_eviction_is_what_the_single_pool_pays_for(tmp_path: Path) -> None:
    found = run(tmp_path, "--recovery", str(written(tmp_path)), "--case", "over_eviction")
    metrics, ratios = found["metrics"], found["ratios"]
    assert found["settings"]["single_pools"] == "128: 2, 256: 2, 512: 3, 1024: 4"
    for machines in (128, 256, 512, 1024):
        case = f"over_eviction_{machines}"
        enough = metrics[f"{case}.ours_standby_compound_pool_s"]["median"]
        swap = 0.9 + 0.25 * machines / 1250
        assert enough == pytest.approx(0.99 * swap + 0.01 * 152.1), "never short but for a switch"
        spare, standby = (ratios[f"{case}.{o}.single/compound"] for o in scheduling.OURS)
        assert spare > standby > 1.1
    assert "was_128.oracle_s" not in metrics


@pytest.mark.usefixtures("records")
def test_later_records_win(tmp_path: Path) -> None:
    other = tmp_path / "lab.json"
    cold = record(node_crash_standby_torch_cold=incident(1.5, 0.0, 0.1, 0.4, 0.0, 0.1, 7.0))
    other.write_text(json.dumps({"metrics": cold, "quick": True}))
    files = ["--recovery", str(written(tmp_path)), "--recovery", str(other)]
    found = run(tmp_path, *files)
    assert found["metrics"]["term.reschedule_s"]["median"] == pytest.approx(7.6)
    assert found["quick"] is True, "as good as the worst of its measurements"


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("metrics", "argv", "says"),
    [
        ({}, [], "node_crash_spare_torch"),
        ([], [], "no record"),
        ({"a.b_s": {"median": 1.0}}, [], "no record"),
        ({"a.b_s": {"median": 2.0, "p95": 1.0, "n": 20}}, [], "cannot have been measured"),
        (FULL, ["--rate", "1e-9"], "no standby is needed"),
        (FULL, ["--rate", "-1"], "-0.001"),
    ],
)
def test_what_cannot_be_used(
    metrics: object,
    argv: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert scheduling.main(["--recovery", str(written(tmp_path, metrics)), *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("records")
def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduling.main(["--recovery", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_each_case_is_taken_whole_from_its_newest_record(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer record of some cases hid all others."""
    assert scheduling.main([]) == 2
    assert "python -m bench.recovery" in capsys.readouterr().err
    spare = {n: v for n, v in OLD.items() if n.startswith("node_crash_spare_torch.")}
    lease = record(node_crash_leased_torch=incident(0.5, 0.0, 0.1, 0.02, 0.05, 0.05, 0.3))
    for name, metrics in {
        "recovery-2026-02-01": {**FULL, **lease},
        "recovery-2026-01-31": FULL,
        "recovery-some-2026-03-01": spare,
        "recovery-2026-02-01b": lease,
        "recovery-before-2026-04-01": record(node_crash_spare_torch=incident(9, 9, 9, 9, 9, 9, 9)),
        "recovery-note": FULL,
        "recovery-few-2026-05-01": {name: {**v, "n": 5} for name, v in spare.items()},
    }.items():
        (records / f"{name}.json").write_text(json.dumps({"metrics": metrics}))
    names = [path.stem.removeprefix("recovery-") for path in scheduling.kept("recovery")]
    assert names == ["2026-01-31", "2026-02-01", "2026-02-01b", "some-2026-03-01", "few-2026-05-01"]
    found = run(tmp_path)
    assert found["metrics"]["term.spare_s"]["median"] == pytest.approx(9.2), "not its restore"
    settings = {name: str(value) for name, value in found["settings"].items()}
    assert "node_crash_standby_torch" in settings["measured_2"]
    assert settings["measured_3"].endswith(": node_crash_leased_torch")
    assert settings["measured_4"].endswith(": node_crash_spare_torch")
    assert "measured_1" not in settings, "all of it was measured again"
    assert "measured_5" not in settings, "5 runs"
    ratio = found["ratios"]["t_1.ours_leased/oracle"]
    assert ratio == pytest.approx((0.52 + 0.2048) / (9.2 + 0.2048), rel=1e-3)
    assert {"t_32.ours_fewer/oracle", "was_128.requeue/ours_leased"} <= found["ratios"].keys()


def test_the_records_that_are_kept_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduling.main([]) == 0
    assert scheduling.kept("recovery")[-1].name in capsys.readouterr().out
