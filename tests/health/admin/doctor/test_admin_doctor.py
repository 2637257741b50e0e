"""The doctor's command on recorded answers of Slurm: what it prints, its exit codes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from slurm_configs import recorded_text

from health.admin import cli
from health.admin.doctor import run as doctor
from health.admin.doctor.site_rules import Bare
from health.settings_file import END
from robust_slurm.slurm import Completed, Slurm


class Answers:
    """A slurmctld that says what was recorded."""

    def __init__(self, config: str, up: bool = True):
        said = {
            "config": recorded_text(config),
            "node": "".join(
                f"NodeName=n{i} State=IDLE Partitions=train Gres=gpu:h100:8\n" for i in (1, 2)
            ),
            "partition": "PartitionName=train Nodes=n[1-2] State=UP\n",
        }
        self.said = said
        self.up = up

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        if "version" in argv:
            return Completed(0, "slurm 24.11.5\n", "")
        if "ping" in argv:
            return Completed(
                0, f"Slurmctld(primary) at head is {'UP' if self.up else 'DOWN'}\n", ""
            )
        assert self.up
        return Completed(0, self.said[argv[-1]], "")


def run(etc: Path, config: str, as_json: bool = False, up: bool = True) -> tuple[int, str]:
    out = io.StringIO()
    code = doctor.main(str(etc), as_json, out, Slurm(Answers(config, up)), lambda gate: Bare(""))
    return code, out.getvalue()


def test_every_fix_is_printed_with_its_line(tmp_path: Path) -> None:
    code, text = run(tmp_path, "22.05")
    assert code == 1
    head = "slurm.conf is head:/var/lab/slurm.conf, and its copies on the nodes"
    assert text.startswith(f"cluster doorlab, Slurm 22.05.8; {head}\n")
    assert "\nFIX    Prolog is not set\n       checks the node" in text
    assert f"\n       slurm.conf:  Prolog={tmp_path}/prolog\n" in text
    assert text.index("FIX ") < text.index("ADVICE")
    assert re.search(r"\n\d+ to fix, \d+ advice, \d+ in order\n$", text)
    code, text = run(tmp_path, "22.05", as_json=True)
    found = json.loads(text)
    assert code == 1 and found["version"] == 1 and found["slurm"] == "22.05.8"
    assert {r["level"] for r in found["remarks"]} == {"ok", "fix", "advice"}
    assert all(r["line"] and r["where"] for r in found["remarks"] if r["level"] == "fix")


def test_a_broken_robust_toml_is_named(tmp_path: Path) -> None:
    toml = tmp_path / "robust.toml"
    toml.write_text(
        "stat_dir = '/s'\n[gate]\nprolog_deadlin = 3.0\n"
        '[nodes."n2".gate]\nprolog_deadline = "x"\n'
        '[nodes."n[1-2]".health.gpu_count]\nexpected = 4\n'
    )
    _, text = run(tmp_path, "24.11-ready", as_json=True)
    said = [r["what"] for r in json.loads(text)["remarks"] if r["subject"] == str(toml)]
    assert any("prolog_deadlin" in what and "did you mean" in what for what in said)
    assert any('nodes."n2"' in what for what in said)
    assert any("stat_dir" in what for what in said)
    gpus = [r for r in json.loads(text)["remarks"] if r["subject"].startswith("GPUs")]
    assert [(r["level"], r["subject"]) for r in gpus] == [("fix", "GPUs of n[1-2]")]


CURE = f"echo '{END}' >>"


@pytest.mark.parametrize("up", [True, False])
def test_a_robust_toml_that_cannot_be_used_is_a_fault(tmp_path: Path, up: bool) -> None:
    toml = tmp_path / "robust.toml"

    def said() -> list[str]:
        code, text = run(tmp_path, "24.11-ready", as_json=True, up=up)
        assert code == (1 if up else 2)
        remarks = [r for r in json.loads(text)["remarks"] if r["subject"] == str(toml)]
        assert {r["level"] for r in remarks} == {"fix"}
        return [r["what"] for r in remarks]

    toml.write_text("[gate]\ndry_run = \n")
    assert any(
        "Invalid value (at line 2, column 11); the defaults apply" in what for what in said()
    )
    (tmp_path / "robust.toml.last").write_text("[gate]\ndry_run = true\n")
    (tmp_path / "robust.toml.last").chmod(0o644)
    assert any("are in force (robust.toml.last)" in what for what in said())
    toml.write_text("[gate]\ndry_run = true\n")
    (told,) = said()
    assert told.endswith(
        f"it is used, as robust.toml.last is the same; if it is whole: {CURE}{toml}"
    )
    toml.write_text("[gate]\n")
    (told,) = said()
    assert "are in force (robust.toml.last)" in told and told.endswith(f"{CURE}{toml}")
    toml.unlink()
    assert len(said()) == 1 and "No such file or directory; the settings of" in said()[0]
    toml.symlink_to("/nowhere")
    assert len(said()) == 1 and "is a link; the settings of" in said()[0]


def test_slurm_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, and what can be seen without Slurm is looked at all the same."""
    (tmp_path / "robust.toml").write_text(f"[gate]\nprolog_deadlin = 3.0\n{END}\n")
    code, text = run(tmp_path, "22.05", as_json=True, up=False)
    assert code == 2
    remarks = json.loads(text)["remarks"]
    assert [r["subject"] for r in remarks] == ["Slurm", f"{tmp_path}/robust.toml", str(tmp_path)]
    assert "no slurmctld answers" in remarks[0]["what"] and "prolog_deadlin" in remarks[1]["what"]
    monkeypatch.setenv("PATH", str(tmp_path))
    out = io.StringIO()
    assert cli.main(["doctor", "--etc", str(tmp_path)], out) == 2
    assert "scontrol is not in PATH" in out.getvalue()
