"""robust-status --diagnose: cause, evidence with places, exit codes; no cluster."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from robust_slurm.commands import words
from status.cli import main

SLURM = "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2024-05-01T10:31:40 ***\n"


def run(*args: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(["--diagnose", *args], out=out), out.getvalue()


def test_two_logs_of_one_job_are_one_story(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(SLURM)
    (tmp_path / "b.log").write_text("step 1\n[rank3]: KeyError: 'labels'\x1b[31m\n")
    code, text = run(str(tmp_path / "a.log"), str(tmp_path / "b.log"))
    assert code == 0
    assert f" > {tmp_path}/b.log:2: KeyError: 'labels'" in text
    assert "blame:    the program" in text and "evict:    none" in text
    assert "and 1 line that only follows from it" in text


def test_a_bad_node_is_named(tmp_path: Path) -> None:
    log = tmp_path / "k.log"
    log.write_text("May  1 10:00:00 n3 kernel: NVRM: Xid (PCI:0000:44:00): 79, pid=1, x\n")
    assert "evict:    n3" in run(str(log))[1]
    code, text = run(str(log), "--json")
    assert code == 0 and json.loads(text)["evict"] == ["n3"]


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[rank3]: KeyError: 'labels'\n")
    read, write = os.pipe()
    os.close(read)  # as `| head` does when it has enough
    command = [sys.executable, *words("status.cli"), "--diagnose", str(tmp_path / "a.log")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_unknown_cause_is_exit_code_1(tmp_path: Path) -> None:
    log = tmp_path / "k.log"
    log.write_text("all is well\n")
    code, text = run(str(log))
    assert code == 1 and "evict:    none" in text


def test_a_missing_log_and_a_bad_signature_file_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path / "none.log"))[0] == 2
    bad = tmp_path / "site.toml"
    bad.write_text("[[signature]]\nid = 'a'\n")
    (tmp_path / "k.log").write_text("x\n")
    assert run(str(tmp_path / "k.log"), "--signatures", str(bad))[0] == 2
    assert f"{bad}: signature 'a': pattern must be a text" in capsys.readouterr().err


def test_the_site_file_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        "[[signature]]\nid = 'oss7'\npattern = 'oss7 is away'\ncause = 'Server oss7 is away'\n"
        "layer = 'storage'\nblame = 'external'\n"
    )
    monkeypatch.setenv("ROBUST_SIGNATURES_FILE", str(site))
    (tmp_path / "k.log").write_text("oss7 is away\n")
    assert "Server oss7 is away" in run(str(tmp_path / "k.log"))[1]
