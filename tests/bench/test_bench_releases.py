"""The matrix of bench.releases: its marks, its reasons, its numbers."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.common import BenchError, Results
from bench.releases import __main__ as bench
from bench.releases import contract
from bench.releases.__main__ import Cell, as_results, column, matrix_table
from bench.releases.cells import CELLS, Missing
from lab.errors import LabError
from lab.slurm import pyslurm_root, releases

NAMES = ["swap_spare", "status", "container"]
MATRIX = {
    "22.05": {
        "swap_spare": Cell([3.0, 5.0, 4.0]),
        "status": Cell([0.25]),
        "container": Cell(reason="no containers"),
    },
    "24.11": {
        "swap_spare": Cell(reason="slurmctld [died]", wrong=True),
        "status": Cell(reason="no containers"),
        "container": Cell(reason="no containers"),
    },
}


def test_the_table_has_a_time_or_a_reason_in_every_cell() -> None:
    table, reasons = matrix_table(MATRIX, NAMES)
    assert reasons == ["slurmctld [died]", "no containers"]
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    rows = [line.replace("│", " ").split() for line in out.getvalue().splitlines()]
    assert ["swap_spare", "●", "4.0", "s", "FAILED", "[1]"] in rows
    assert ["status", "●", "0.2", "s", "[2]"] in rows
    assert ["container", "[2]", "[2]"] in rows


def test_the_numbers() -> None:
    results = Results("releases")
    as_results(MATRIX, results)
    assert results.metrics["releases.cells"].median == 2
    assert results.metrics["releases.missing"].median == 4
    assert results.metrics["22.05.swap_spare_s"].median == 4.0
    assert results.settings["24.11.swap_spare"] == "slurmctld [died]"
    assert results.settings["22.05.container"] == "no containers"


def test_a_column_goes_on_after_a_cell_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(lab: Any) -> float:
        raise BenchError("not recovered")

    def is_missing(lab: Any) -> float:
        raise Missing("not built")

    @contextlib.contextmanager
    def site(release: str) -> Iterator[None]:
        yield None

    monkeypatch.setattr(releases, "find", lambda release: releases.Release(release, None))
    monkeypatch.setattr(bench, "site", site)
    cells = {"swap_spare": fails, "status": lambda lab: 1.5, "container": is_missing}
    monkeypatch.setattr(bench, "CELLS", cells)
    assert column("24.11", NAMES, 2) == {
        "swap_spare": Cell([], "not recovered", True),
        "status": Cell([1.5, 1.5]),
        "container": Cell(reason="not built"),
    }


def test_a_release_that_cannot_be_built_is_a_reason() -> None:
    found = column("1.0", NAMES, 1)
    assert {(cell.wrong, "choose from" in cell.reason) for cell in found.values()} == {
        (False, True)
    }


def test_every_cell_says_what_it_proves() -> None:
    assert all(cell.__doc__ for cell in CELLS.values()) and len(CELLS) == 9


def test_a_release_without_pyslurm_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(root: Path, source: Path) -> None:
        raise LabError(f"{root} is not there: name the source")

    monkeypatch.setattr(pyslurm_root, "build", refuse)
    for release, why in (("22.05", "API"), ("24.11", "name the source"), ("26.05", "25.11")):
        assert why in contract.why_not(release)


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("12 skipped", 0),
        ("11 passed, 1 skipped", 0),
        ("no tests ran", 5),
        ("1 failed, 9 passed", 1),
    ],
)
def test_a_contract_that_did_not_run_has_no_time(
    monkeypatch: pytest.MonkeyPatch, last: str, code: int
) -> None:
    def run(*_: object, quiet: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, f"....\n{last} in 3.0s\n", "")

    monkeypatch.setattr(pyslurm_root, "run", run)
    with pytest.raises(BenchError, match=last):
        contract.contract()
