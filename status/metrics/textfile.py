"""``robust-status --metrics FILE``: the metrics in a file that is replaced at once."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from robust_slurm.command_line.errors import CommandError
from status.metrics.families import Family, families
from status.metrics.text import exposition
from status.report.write import replace_text
from status.show import print_json, read_accounts, read_cluster
from status.source import RecordSource, ask_slurm


def write_metrics(path: Path, source: RecordSource, out: IO[str], as_json: bool = False) -> int:
    """Write the metrics, also while Slurm does not answer: robust_slurm_slurm_up is then 0."""
    made, wrong = collect(source)
    try:
        replace_text(path, exposition(made))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None
    if as_json:
        print_json({"metrics": str(path), "complete": not wrong}, out)
    return 1 if wrong else 0


def collect(source: RecordSource) -> tuple[list[Family], bool]:
    """The metrics now, and whether Slurm or the records could not be read."""
    found = read_cluster(source)
    view = ask_slurm(source.door, with_nodes=False)
    accounts, _ = read_accounts(source, view)
    wrong = bool(found.report.slurm_error or found.wrong)
    return families(found, accounts, source.now), wrong
