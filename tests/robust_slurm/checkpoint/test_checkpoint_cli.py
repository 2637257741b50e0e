"""``robust-ckpt``: what it shows, how it fails, and that it needs torch for export alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import data_parallel, private, save_snapshot, save_world
from durable_tiers import commit_now

from robust_slurm.checkpoint import cli
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.dcp.write import write
from robust_slurm.checkpoint.format import digest


@pytest.fixture
def tier(tmp_path: Path, trained_state: dict[str, Any]) -> Path:
    """Steps 100 and 200 committed, 300 half written."""
    path = tmp_path / "tier"
    path.mkdir()
    for step in (100, 200, 300):
        sources = save_world(tmp_path / "shm", trained_state, 2, data_parallel, step=step)
        for source in sources[: 1 if step == 300 else 2]:
            write(str(source), path, "4711.e1")
        if step != 300:
            commit_now(path, step, 2, "4711.e1", keep=9)
    return path


def run(*argv: str | Path) -> tuple[int, str]:
    out = io.StringIO()
    return cli.main([str(arg) for arg in argv], out), out.getvalue()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def one_line(text: str, *words: str) -> bool:
    return any(all(word in line for word in words) for line in text.splitlines())


# ---------------------------------------------------------------- ls


def test_ls_of_a_checkpoint_directory(tier: Path) -> None:
    code, text = run("ls", tier)
    assert code == 0
    assert one_line(text, "100", "committed", "4711.e1")
    assert one_line(text, "300", "not committed", "1 rank has written")
    assert "newest committed: step 200" in text


def test_ls_as_json(tier: Path) -> None:
    code, text = run("ls", tier, "--json")
    data = json.loads(text)
    assert (code, data["version"], data["files"]) == (0, 1, [])
    assert [(s["step"], s["state"], s["world"]) for s in data["steps"]] == [
        (100, "committed", 2), (200, "committed", 2), (300, "not committed", None),
    ]  # fmt: skip
    assert all(s["bytes"] > 1000 for s in data["steps"])


def test_ls_of_one_step(tier: Path) -> None:
    code, text = run("ls", durable.step_dir(tier, 200))
    assert code == 0
    assert one_line(text, "200", "committed")
    assert "100" not in text.split("RUN")[1].split("newest")[0].replace("4711", "")


def test_ls_says_when_a_manifest_is_damaged(tier: Path) -> None:
    (durable.step_dir(tier, 200) / "manifest.json").write_text("{")
    code, text = run("ls", tier)
    assert code == 1
    assert one_line(text, "200", "damaged", "manifest.json")
    assert "newest committed: step 100" in text


def test_ls_of_snapshots_in_memory(tmp_path: Path) -> None:
    pieces = [private("model.w", torch.ones(9))]
    whole = save_snapshot(
        tmp_path / "own-3-1.safetensors", pieces, {}, step=41, rank=3, world=8, epoch=2
    )
    torn = tmp_path / "replica-5-0.safetensors"
    torn.write_bytes(bytes(8) + whole.read_bytes()[8:])
    (tmp_path / "notes.safetensors").write_text("not one of ours")
    code, text = run("ls", tmp_path)
    assert code == 0
    assert one_line(text, "own-3-1.safetensors", "complete", "41", "77")
    assert one_line(text, "replica-5-0.safetensors", "being written")
    assert "notes" not in text
    (tmp_path / "fetched-1-7.safetensors").write_bytes(b"garbage that is long enough")
    code, text = run("ls", tmp_path, "--json")
    assert code == 1
    states = {Path(f["path"]).name: f["state"] for f in json.loads(text)["files"]}
    assert states["fetched-1-7.safetensors"] == "damaged"


def test_ls_takes_the_directory_of_the_run(
    tier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBUST_CHECKPOINT_DIR", str(tier))
    assert "step 200" in run("ls")[1]
    monkeypatch.delenv("ROBUST_CHECKPOINT_DIR")
    assert run("ls")[0] == 2
    assert "ROBUST_CHECKPOINT_DIR" in capsys.readouterr().err


def test_the_users_own_link_is_followed(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tier.parent / "latest").symlink_to(durable.step_dir(tier, 200))
    assert run("verify", tier.parent / "latest")[0] == 0
    assert "committed" in run("ls", tier.parent / "latest")[1]
    monkeypatch.chdir(tier)
    assert "step 200" in run("ls", ".")[1]


def test_links_in_a_checkpoint_are_not_followed(tier: Path, tmp_path: Path) -> None:
    where = durable.step_dir(tier, 200)
    (where / "4711.e1-0_0.distcp").rename(tmp_path / "data")
    (where / "4711.e1-0_0.distcp").symlink_to(tmp_path / "data")
    code, text = run("verify", where)
    assert (code, "links are not followed" in text) == (1, True)
    (where / "manifest.json").rename(tmp_path / "manifest.json")
    (where / "manifest.json").symlink_to(tmp_path / "manifest.json")
    assert one_line(run("ls", tier)[1], "200", "not committed")


def test_ls_of_nothing(tmp_path: Path) -> None:
    assert run("ls", tmp_path) == (0, f"No checkpoints in {tmp_path}.\n")


def test_text_from_files_cannot_drive_the_terminal(tier: Path) -> None:
    path = durable.step_dir(tier, 200) / "manifest.json"
    data = json.loads(path.read_text())
    data["mesh"] = {"\x1b]0;owned\x07[red]\n": 2}
    path.write_text(json.dumps(data))
    _, text = run("ls", tier)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text


# ---------------------------------------------------------------- verify


def test_verify_good_ones(tier: Path) -> None:
    code, text = run("verify", tier)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["good", "good"]
    assert run("verify", durable.step_dir(tier, 100))[0] == 0


def test_verify_names_the_damaged_file(tier: Path) -> None:
    where = durable.step_dir(tier, 100)
    flip(where / "4711.e1-1_0.distcp")
    code, text = run("verify", tier)
    assert code == 1
    assert one_line(text, "BAD", "step-00000100")
    assert one_line(text, "good", "step-00000200")
    assert one_line(text, "4711.e1-1_0.distcp", "differs from its digest")
    code, text = run("verify", tier, "--json")
    assert code == 1
    bad, good = json.loads(text)["checked"]
    assert (bad["good"], good["good"], good["problems"]) == (False, True, [])
    assert [p["file"] for p in bad["problems"]] == ["4711.e1-1_0.distcp"]


def test_verify_of_an_uncommitted_step_or_nothing(
    tier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run("verify", durable.step_dir(tier, 300))
    assert (code, "never committed" in text) == (1, True)
    (tmp_path / "empty").mkdir()
    assert run("verify", tmp_path / "empty")[0] == 1
    assert "no complete checkpoint" in capsys.readouterr().err


def test_verify_a_snapshot_file(tmp_path: Path) -> None:
    path = save_snapshot(tmp_path / "own-0-41.safetensors", [private("w", torch.ones(99))], {})
    code, text = run("verify", path)
    assert (code, "no digest beside" in text, text.startswith("good")) == (0, True, False)
    with open(path, "rb") as file:
        crcs = digest.take(file.fileno(), path.stat().st_size)
    (tmp_path / "own-0-41.json").write_text(json.dumps({"digest": crcs}))
    code, text = run("verify", tmp_path)
    assert (code, text.startswith("good")) == (0, True)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"\x01")
    code, text = run("verify", path)
    assert (code, "differs from its digest" in text) == (1, True)
    path.write_bytes(raw[:-1])
    assert run("verify", path)[0] == 1
    path.write_bytes(bytes(8) + raw[8:])
    code, text = run("verify", path)
    assert (code, "torn" in text) == (1, True)


# ---------------------------------------------------------------- export


def test_export(tier: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    code, text = run("export", durable.step_dir(tier, 200), out, "--only", "model", "--json")
    assert code == 0
    assert json.loads(text)["tensors"] == 10
    assert out.stat().st_size == json.loads(text)["bytes"]
    code, text = run("export", durable.step_dir(tier, 200), tmp_path / "x.pt")
    assert code == 0
    assert "tensors and" in text


def test_export_of_a_run_takes_its_newest_step_that_is_not_doubted(
    tier: Path, tmp_path: Path
) -> None:
    assert json.loads(run("export", tier, tmp_path / "a.pt", "--json")[1])["source"] == str(
        durable.step_dir(tier, 200)
    )
    durable.doubt(tier, 200, "a rank could not read it")
    code, text = run("export", tier, tmp_path / "b.pt")
    assert (code, "step-00000100, " in text) == (0, True)


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("absent", "x.pt", "is not a directory"),
        ("step", "x.bin", "must end in .safetensors or .pt"),
        ("step", "there.pt", "is there already"),
        ("step", "no/x.pt", "is not a directory"),
        ("empty", "x.pt", "has no complete step in it"),
    ],
)
def test_bad_input_to_export(
    tier: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    target: str,
    says: str,
) -> None:
    (tmp_path / "there.pt").write_text("")
    (tmp_path / "e").mkdir()
    step = durable.step_dir(tier, 200)
    paths = {"absent": tmp_path / "a", "step": step, "empty": tmp_path / "e"}
    assert run("export", paths[source], tmp_path / target)[0] == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "there.pt").read_text() == ""


def test_export_of_a_damaged_step(
    tier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = durable.step_dir(tier, 200)
    flip(where / "4711.e1-0_0.distcp")
    assert run("export", where, tmp_path / "x.pt")[0] == 1
    assert "differs from its digest" in capsys.readouterr().err
    assert not list(tmp_path.glob("*x.pt*"))


# ---------------------------------------------------------------- usage, no torch


@pytest.mark.parametrize(
    "argv", [[], ["ls", "/absent"], ["verify"], ["verify", "/absent"], ["dance"], ["ls", "--x"]]
)
def test_usage_errors_are_2(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROBUST_CHECKPOINT_DIR", raising=False)
    assert run(*argv)[0] == 2


def test_help_is_0() -> None:
    code, text = run("--help")
    assert code == 0 and "verify" in text


def without_torch(*argv: str | Path) -> Any:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from robust_slurm.checkpoint.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=60
    )


def test_only_export_needs_torch(tier: Path, tmp_path: Path) -> None:
    assert without_torch("ls", tier).returncode == 0
    assert without_torch("verify", tier).returncode == 0
    done = without_torch("export", durable.step_dir(tier, 200), tmp_path / "x.pt")
    assert done.returncode == 2
    assert "export needs torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away(tier: Path) -> None:
    command = f"{sys.executable} -m robust_slurm.checkpoint.cli ls {tier} --json | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr


def test_links_in_a_circle_are_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert cli.main(["ls", str(tmp_path / "a")]) == 2
    assert "robust-ckpt ls: " in capsys.readouterr().err
