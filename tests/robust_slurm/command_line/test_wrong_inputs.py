"""Wrong inputs of all commands: one line that says what to do, its exit code, nothing changed.

Each row runs in this process, with ``--json`` as well where the command has it: the same exit code
and message, as a JSON document on stdout.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from lab.pages.command_table import COMMANDS, parser_of
from robust_slurm.command_line.parser import Parser

MAINS = {name: module for name, module in COMMANDS.items() if name != "robust-srun"}
MAINS["robust-srun"] = "srun_wrapper.cli"
SIZE = "robust-standby size --nodes 10 --rate 1"

# {t}: a directory with what `site` below makes.
TABLE = [
    # words that are none
    ("robust-status --jsn", 2, "no such option: --jsn; did you mean --json?"),
    ("robust-status --state_dir=x", 2, "no such option: --state_dir; did you mean --state-dir?"),
    ("robust-status --lemon", 2, "no such option: --lemon; did you mean --lemons?"),
    ("robust-status --qqq", 2, "no such option: --qqq"),
    ("robust-status --lemons --format csv", 2, "--format: not 'csv'; use exclude"),
    ("robust-status --format", 2, "--format: needs a value"),
    ("robust-status 1 2", 2, "unexpected: 2"),
    ("robust-status 0", 2, "not a job id"),
    ("robust-status ../n1", 2, "not a job id or the name of a node"),
    ("robust-status --lemons --rules", 2, "do not go together"),
    ("robust-status -M other", 2, "-M: shows the cluster of this host only"),
    ("robust-status --state-dir={t}/state", 1, "scontrol is not in PATH"),
    ("robust-status --state-dir={t}/state 7", 1, "no record of job 7"),
    ("robust-status --diagnose {t}/none.log", 2, "{t}/none.log"),
    ("robust-status --diagnose {t}", 2, "{t}"),
    ("robust-status --diagnose {t}/log --signatures {t}/none.toml", 2, "{t}/none.toml"),
    ("robust-standby", 2, "no command; use size, apply or show"),
    ("robust-standby aply", 2, "no such command: aply; did you mean apply?"),
    ("robust-standby shwo", 2, "no such command: shwo; did you mean show?"),
    ("robust-standby remove", 2, "no such command: remove"),
    ("robust-standby size", 2, "--nodes N is missing"),
    ("robust-standby size --nodes 10", 2, "give either --rate R or --from-ledger"),
    ("robust-standby size --nodes 0 --rate 1", 2, "not a number of nodes"),
    ("robust-standby size --nodes", 2, "--nodes: needs a value"),
    (f"{SIZE} --quantile 99", 2, "like 0.99"),
    (f"{SIZE} --quantil 0.9", 2, "no such option: --quantil; did you mean --quantile?"),
    (f"{SIZE} --json=yes", 2, "--json: takes no value"),
    ("robust-standby size --nodes 10 --from-ledger --state-dir {t}/none", 2, "not a directory"),
    ("robust-standby size --nodes 10 --from-ledger --state-dir {t}/state", 1, "no job in"),
    ("robust-standby apply --node n1", 2, "no such option: --node; did you mean --nodes?"),
    ("robust-standby apply --nodes n[1- --yes", 2, "--nodes: "),
    ("robust-standby apply --refill tran", 2, "use train or pool; did you mean train?"),
    ("robust-standby apply --size many --yes", 2, "not a number of nodes"),
    ("robust-standby apply --state-dir {t}/state --yes", 2, "--nodes is missing"),
    ("robust-standby show --state-dir {t}/state", 1, "no pool"),
    ("robust-update", 2, "missing: JOB"),
    ("robust-update x", 2, "not a job id"),
    ("robust-update 7 --rolback", 2, "no such option: --rolback; did you mean --rollback?"),
    ("robust-update 7 --now --lazy", 2, "--lazy: does not go together with --now"),
    ("robust-update 7 --list --lazy", 2, "--lazy goes with an update alone"),
    ("robust-update 7 --wait soon", 2, "not a number of seconds: 'soon'"),
    ("robust-update 7 --state-dir {t}/state", 2, "no records of job 7"),
    ("robust-update 7 -M other", 2, "-M: a job is found by its records"),
    ("robust-ckpt", 2, "no command; use ls, verify or export"),
    ("robust-ckpt vrify {t}", 2, "no such command: vrify; did you mean verify?"),
    ("robust-ckpt verify", 2, "missing: PATH"),
    ("robust-ckpt verify {t}/none", 2, "{t}/none is not a directory"),
    ("robust-ckpt verify {t}/state", 1, "there is no complete checkpoint in {t}/state"),
    ("robust-ckpt ls", 2, "name a directory, or set ROBUST_CHECKPOINT_DIR"),
    ("robust-ckpt ls {t}/log", 2, "{t}/log is not a directory"),
    ("robust-ckpt ls {t}/circle", 2, "cannot be read"),
    ("robust-ckpt export {t}", 2, "missing: OUT"),
    ("robust-ckpt export {t}/none {t}/x.pt", 2, "{t}/none is not a directory"),
    ("robust-ckpt export {t}/state {t}/x.zip", 2, "the name must end in .safetensors or .pt"),
    ("robust-ckpt export {t}/state {t}/there.pt", 2, "is there already; name a new file"),
    ("robust-ckpt export {t}/state {t}/x.pt --olny m", 2, "--olny; did you mean --only?"),
    ("robust-health", 2, "no command; use check"),
    ("robust-health chek", 2, "no such command: chek; did you mean check?"),
    ("robust-health check --jsno", 2, "no such option: --jsno; did you mean --json?"),
    ("robust-health check --where prolgo", 2, "did you mean prolog?"),
    ("robust-health check --only mount", 2, "no such family; did you mean mounts?"),
    ("robust-health check --config {t}/none.toml", 2, "{t}/none.toml: No such file"),
    ("robust-health check --config {t}", 2, "{t}: Is a directory"),
    ("robust-health check --config {t}/bad.toml", 2, "[gate.enabeld] is unknown"),
    ("robust-health check --config {t}/torn.toml", 2, "{t}/torn.toml: "),
    ("robust-health status --config {t}/bad.toml", 2, "[gate.enabeld] is unknown"),
    ("robust-health repaired --config {t}/bad.toml", 2, "did you mean enabled?"),
    ("robust-health repaired --noet x", 2, "no such option: --noet; did you mean --note?"),
    ("robust-health repaired --reset gpu9", 2, "--reset gpu9: NVML shows"),
    ("robust-health record", 2, "missing: DIR"),
    ("robust-health record {t}/log", 2, "{t}/log"),
    ("robust-health replay {t}/none", 2, "is not a directory"),
    ("robust-health replay {t}/state", 2, "not a recording"),
    ("robust-health explain mountz", 2, "did you mean mounts"),
    ("robust-health explain xid 99999", 2, "Xid 99999: not in the catalogue"),
    ("robust-health baseline --hots", 2, "no such option: --hots; did you mean --host?"),
    ("robust-health list --all", 2, "no such option: --all"),
    ("robust-health sweep --dry", 2, "no such option: --dry; did you mean --dry-run?"),
    ("robust-health test gem", 2, "gem: no such test; did you mean gemm?"),
    ("robust-health test --levl quick", 2, "no such option: --levl; did you mean --level?"),
    ("robust-health test --level quik", 2, "did you mean quick?"),
    ("robust-health test --limit 0", 2, "--limit 0: seconds, above 0"),
    ("robust-health test --config {t}/bad.toml", 2, "[gate.enabeld] is unknown"),
    ("robust-health test --python {t}/none", 2, "no such program, or not executable"),
    ("robust-health test --nodes n1", 2, "requires a job that owns the nodes"),
    ("robust-health burn-in", 2, "missing: NODES"),
    ("robust-health burn-in n1 --config {t}/none.toml", 2, "{t}/none.toml: No such file"),
    ("robust-health burn-in n1", 3, "scontrol is not in PATH"),
    ("robust-admin", 2, "no command; use install, uninstall or doctor"),
    ("robust-admin instal", 2, "no such command: instal; did you mean install?"),
    ("robust-admin install --dryrun", 2, "no such option: --dryrun; did you mean --dry-run?"),
    ("robust-admin install --etc relative --yes", 2, "not an absolute path"),
    ("robust-admin install --prefix {t}/none --yes", 2, "no bin/python3"),
    ("robust-admin install --etc {t}/etc --yes", 2, "'spars'; did you mean spares?"),
    ("robust-admin install --nodes n1 --yes", 2, "--nodes and --ssh must be used together"),
    ("robust-admin install --nodes n1 --ssh --port 0 --yes", 2, "not a port"),
    ("robust-admin install --nodes n1 --ssh --identity {t}/none --yes", 2, "No such file"),
    ("robust-admin doctor --ect x", 2, "no such option: --ect; did you mean --etc?"),
    ("robust-admin doctor --etc {t}/etc", 2, "unknown setting 'spars'"),
    ("robust-prolog --dryrun", 2, "no such option: --dryrun; did you mean --dry-run?"),
    ("robust-epilog now", 2, "unexpected: now"),
    # robust-srun: its own options
    ("robust-srun --robust-spare=1 true", 2, "--robust-spare; did you mean --robust-spares?"),
    ("robust-srun --robust-spares=x true", 2, "--robust-spares: spares = 'x'"),
    ("robust-srun --robust-requeue=atuo true", 2, "use one of auto, never; did you mean auto?"),
    ("robust-srun --robust-hang=1 true", 2, "takes no value"),
    ("robust-srun --robust-config={t}/none true", 2, "{t}/none: cannot be read: No such file"),
    ("robust-srun --robust-config={t}/mine.toml true", 2, "unknown setting 'spars'; did you mean"),
    ("robust-srun --robust-config={t}/torn.toml true", 2, "{t}/torn.toml: cannot be read"),
    ("robust-srun", 2, "no command given"),
    ("robust-srun true", 2, "no allocation"),
]  # fmt: skip
assert len(TABLE) > 100


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Slurm; files that are right and wrong; root, whoever runs the tests."""
    for name in ("state", "home", "bin", "etc", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "log").write_text("nothing\n")
    (tmp_path / "there.pt").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "site.toml").write_text(f'[gate]\nspool = "{tmp_path}/spool"\n')
    (tmp_path / "bad.toml").write_text("[gate]\nenabeld = true\n")
    (tmp_path / "torn.toml").write_text("[gate\n")
    (tmp_path / "mine.toml").write_text("spars = 1\n")
    (tmp_path / "etc/robust.toml").write_text("spars = 1\n")
    for name in [*os.environ]:
        if name.startswith(("ROBUST_", "SLURM")):
            monkeypatch.delenv(name)
    srun = tmp_path / "bin/srun"
    srun.write_text("#!/bin/sh\nexit 99\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROBUST_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setattr("health.gate.act.PLACES", str(tmp_path / "bin"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path


def tree(top: Path) -> list[tuple[str, int, int]]:
    found = []
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        found.append((str(path), info.st_size, info.st_mtime_ns))
    return found


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[list[str]], tuple[int, str, str]]]:
    def call(words: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", words)
        try:
            code = import_module(MAINS[words[0]]).main()
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, err

    yield call


def has_json(words: list[str]) -> bool:
    parser = parser_of(words[0])
    inner = parser.commands().get(words[1]) if len(words) > 1 else None
    return "--json" in (inner or parser).format_help()


@pytest.mark.parametrize(("line", "code", "said"), TABLE)
def test_wrong_input(
    line: str, code: int, said: str, site: Path, run: Callable[[list[str]], tuple[int, str, str]]
) -> None:
    words, said = shlex.split(line.replace("{t}", str(site))), said.replace("{t}", str(site))
    before = tree(site)
    found, out, err = run(words)
    told = " ".join((err + out).split())  # doctor wraps where the length of a path has it
    assert (found, said in told) == (code, True), (out, err)
    lines = [text for text in err.splitlines() if not text.startswith("Options: ")]
    assert all(text.startswith(f"{words[0]}") for text in lines), err
    assert "Traceback" not in err and "usage:" not in err
    if has_json(words) and "--json" not in line:
        again, out, err = run([*words, "--json"])
        assert again == code, (out, err)
        shown = json.loads(out)
        if "error" in shown:
            error = shown["error"]
            whole = "; ".join(filter(None, [error["message"], error["hint"]]))
            assert said in whole and error["exit_code"] == code
            assert "Options:" not in err
    assert tree(site) == before, "something was changed"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parser_has_help_version_and_json(command: str) -> None:
    without_json = ("robust-srun", "robust-prolog", "robust-epilog")
    parser = parser_of(command)
    for one in (parser, *parser.commands().values()):
        assert isinstance(one, Parser) and not one.allow_abbrev
        wanted = ["--robust-help", "--robust-version"]
        if command != "robust-srun":
            wanted = ["--help", "--version"]
            if command not in without_json and not one.commands():
                wanted.append("--json")
        assert set(wanted) <= set(one._option_string_actions)
