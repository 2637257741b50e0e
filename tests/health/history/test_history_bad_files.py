"""Files of root that hold brackets without end or an infinite number: as any other bad file."""

from __future__ import annotations

from pathlib import Path

import pytest

from health import baseline
from health.admin import install
from health.admin.install import InstallError
from health.history import events as history
from health.history import job_notes
from health.node.system import Event

DEEP = "[" * 3000


@pytest.mark.parametrize("text", [DEEP, "[1e999, 0, 0, 0]"])
def test_a_position_that_cannot_be_read_is_sought_again(tmp_path: Path, text: str) -> None:
    spool, state = tmp_path / "spool", tmp_path / "state"
    (state / "nodes").mkdir(parents=True)
    first, second = (Event(time, "drain", "boot-1", {}) for time in (1000.0, 1001.0))
    assert not any(history.record(str(spool), str(state), "n1", [first], 10.0))
    (position,) = spool.glob("*shared*")
    position.write_text(text)
    assert not any(history.record(str(spool), str(state), "n1", [second], 10.0))
    assert history.load(str(spool)) == [first, second]


@pytest.mark.parametrize("text", [DEEP, '[7, 1, 1, 7, 1e999, [], 1e999, ""]'])
def test_a_jobs_note_that_cannot_be_read_is_removed(tmp_path: Path, text: str) -> None:
    note = job_notes.JobNote(7, 1000, 1000, 7, 50.0, ())
    job_notes.save(str(tmp_path), note)
    (there,) = tmp_path.rglob("*.json")
    there.with_name("8.json").write_text(text)
    there.with_name("8.json").chmod(0o644)
    assert job_notes.notes(str(tmp_path), 60.0) == [note]


def test_a_baseline_of_brackets_is_an_error_with_its_cure(tmp_path: Path) -> None:
    path = tmp_path / baseline.FILE
    path.write_text(DEEP)
    with pytest.raises(OSError, match="remove it and record again"):
        baseline._update(str(tmp_path), {}, False)


def test_a_manifest_of_brackets_is_an_error_with_its_cure(tmp_path: Path) -> None:
    path = tmp_path / install.MANIFEST
    path.write_text(DEEP)
    with pytest.raises(InstallError, match="repair it"):
        install.read_manifest(str(tmp_path))
