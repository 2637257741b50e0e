"""The replay corpus: every tree gives its expected verdict, and no healthy node is drained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import REPOSITORY
from replay_corpus import DATA, Case, Corpus, pack, write

from health import cli
from health.checks import ALL
from health.finding import ACTIONS
from robust_slurm.drain_reason import parse_reason

CORPUS = Corpus()
CASES = tuple(CORPUS.cases.values())
HEALTHY = tuple(case for case in CASES if case.group.startswith("healthy"))
OWNER = {condition.check: check.name for check in ALL for condition in check.conditions}
AS_A_PROCESS = ("hgx-h100", "cpu-node", "xid-79-off-the-bus", "no-nvml-library")


def lead(verdict: dict[str, Any]) -> str:
    if not verdict["closed"]:
        return "open"
    first = verdict["closing"][0]
    return f"{first['status']} {first['check']} {first['device'] or '-'} {first['action']}"


def others(report: dict[str, Any]) -> list[str]:
    """Every finding but the one that leads."""
    first = report["verdict"]["closing"][:1]
    found = [finding for finding in report["findings"] if finding not in first]
    return sorted(f"{f['status']} {f['check']} {f['device']}".strip() for f in found)


def family(check: str) -> str:
    """The family of a finding's id; that of "mounts-hung" and "xid-error" is in the name."""
    return OWNER.get(check) or check.rpartition("-")[0]


class Shelf:
    """One tree on disk for each base, changed from case to case: a tree has hundreds of files."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.files: dict[str, dict[str, str]] = {}

    def place(self, case: Case) -> Path:
        root, bundle = CORPUS.root(case.name), CORPUS.bundle(case.name)
        write(bundle, self.top / root, self.files.get(root))
        self.files[root] = bundle["files"]
        return self.top / root


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_expected_verdict(case: Case, shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["replay", str(shelf.place(case)), "--json"])
    report = json.loads(capsys.readouterr().out)
    verdict = report["verdict"]
    told = [f"{f['check']}: {f['evidence']}" for f in report["findings"]]
    assert (lead(verdict), verdict["reason"]) == (case.lead, case.reason), told
    assert others(report) == sorted(case.also), told
    assert code == (0 if case.healthy else 1)
    reason = parse_reason(verdict["reason"])
    assert case.healthy or (reason and reason.action in ACTIONS)


@pytest.mark.parametrize("name", AS_A_PROCESS)
def test_the_command_says_the_same(name: str, tmp_path: Path) -> None:
    case = CORPUS.cases[name]
    CORPUS.build(name, tmp_path)
    words = [sys.executable, "-m", "health.cli", "replay", str(tmp_path)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if case.healthy else 1) and done.stderr == ""
    said = f"reason: {case.reason}" if case.reason else "PASS: open, the node takes jobs"
    assert said in done.stdout.splitlines()


def test_there_are_enough_and_no_healthy_node_is_drained() -> None:
    drained = [case.name for case in HEALTHY if not case.healthy]
    assert drained == []
    assert len(CASES) >= 150 and len(HEALTHY) >= 60
    assert len({case.base for case in HEALTHY}) >= 8  # of so many kinds


def test_every_family_leads_or_reports_somewhere() -> None:
    """Every family that can close the gate leads in some case, too."""
    leading = {family(case.lead.split()[1]) for case in CASES if not case.healthy}
    telling = leading | {family(found.split()[1]) for case in CASES for found in case.also}
    closing = {check.name for check in ALL if any(c.status == "FAIL" for c in check.conditions)}
    assert {check.name for check in ALL} - telling == set()
    assert closing - leading == set()


def test_every_action_is_led_to() -> None:
    assert {case.lead.split()[3] for case in CASES if not case.healthy} == set(ACTIONS)


def test_nothing_names_a_machine_or_a_person() -> None:
    own = {os.uname().nodename, str(REPOSITORY)}
    for path in DATA.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not [word for word in own if len(word) > 3 and word in text], path
            assert "/home/" not in text.replace("srv:/home", "").replace(" /home ", ""), path


def test_a_changed_tree_is_the_same_as_a_new_one(tmp_path: Path) -> None:
    before, after = CORPUS.bundle("gpu-off-the-pci-bus"), CORPUS.bundle("configless")
    write(before, tmp_path / "changed")
    write(after, tmp_path / "changed", before["files"])
    write(after, tmp_path / "new")
    trees = [
        {str(p.relative_to(top)): p.is_dir() or p.read_text() for p in top.rglob("*")}
        for top in (tmp_path / "changed", tmp_path / "new")
    ]
    assert trees[0] == trees[1]


def test_a_packed_tree_is_the_same_tree(tmp_path: Path) -> None:
    CORPUS.build("xid-79-off-the-bus", tmp_path / "one")
    meta = json.loads((tmp_path / "one/meta.json").read_text())
    (tmp_path / "one/meta.json").write_text(json.dumps(meta | {"settings": {"gate": {}}}))
    write(pack(tmp_path / "one"), tmp_path / "two")
    files = {
        path.relative_to(tmp_path / "one"): path.read_text()
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    }
    for name, text in files.items():
        again = (tmp_path / "two" / name).read_text()
        same = json.loads(again) == meta if name.name == "meta.json" else again == text
        assert same, name


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ('base = "h100"\nsource = "x"\nexpect = { lead = "open" }\nnmvl = {}', "nmvl"),
        ('base = "h100"\nexpect = { lead = "open" }', "source"),
    ],
)
def test_a_case_with_a_wrong_key_is_refused(patch: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases/x.toml").write_text(f"[x]\n{patch}\n")
    with pytest.raises(ValueError, match=said):
        Corpus(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        'remove = ["/nowhere"]',
        'nvml = { "devices/8/mig" = true }',
        'nvml_remove = ["devices/0/nothing"]',
        "kmsg = [[9e9, 4, 'x']]",
        'append = { "/nowhere" = "x" }',
    ],
)
def test_a_patch_that_changes_nothing_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()
    text = f'[x]\nbase = "h100"\nsource = "x"\nexpect = {{ lead = "open" }}\n{line}\n'
    (tmp_path / "cases/x.toml").write_text(text)
    corpus = Corpus(tmp_path)
    corpus.bases = CORPUS.bases
    with pytest.raises(ValueError, match=r"x\.toml: x: "):
        corpus.bundle("x")
