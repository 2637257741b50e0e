"""robust-srun's command line: split like srun would, and nothing lost on the way."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srun_wrapper.command.srun_options import UsageError, split
from srun_wrapper.command.srun_table import ALIASES, LONG, SHORT
from srun_wrapper.command.step_request import effective

FLAGS = {"robust-spares": True, "robust-max-restarts": True, "robust-no-auto": False}
FLAGS["robust-help"] = False


@pytest.mark.parametrize(
    ("line", "options", "command"),
    [
        ("cmd -N4 --label", [], "cmd -N4 --label"),
        ("-N4 cmd", [("nodes", "4")], "cmd"),
        ("-N 4 cmd", [("nodes", "4")], "cmd"),
        ("--nodes=4 cmd", [("nodes", "4")], "cmd"),
        ("--nodes 4 cmd", [("nodes", "4")], "cmd"),
        ("--nod 4 cmd", [("nodes", "4")], "cmd"),  # nodefile, nodelist differ
        ("-lu cmd", [("label", None), ("unbuffered", None)], "cmd"),
        ("-lN 4 cmd", [("label", None), ("nodes", "4")], "cmd"),
        ("-K0 cmd", [("kill-on-bad-exit", "0")], "cmd"),
        ("-K 0 cmd", [("kill-on-bad-exit", None)], "0 cmd"),
        ("-lK1 cmd", [("label", None), ("kill-on-bad-exit", "1")], "cmd"),
        ("--kill-on-bad-exit 0 cmd", [("kill-on-bad-exit", None)], "0 cmd"),
        ("--no-kill=off cmd", [("no-kill", "off")], "cmd"),
        ("-n 2 -- -odd", [("ntasks", "2")], "-odd"),
        ("-n -- cmd", [("ntasks", "--")], "cmd"),
        ("--tasks-per-node=2 cmd", [("ntasks-per-node", "2")], "cmd"),
        ("--cpu_bind=none cmd", [("cpu-bind", "none")], "cmd"),
        ("--cpu-b none cmd", [("cpu-bind", "none")], "cmd"),
        ("--site-plugin=x cmd", [("site-plugin", "x")], "cmd"),
        ("--container-image a/b cmd", [("container-image", "a/b")], "cmd"),
        ("--output= cmd", [("output", "")], "cmd"),
        ("-yN4 cmd", [("y", None)], "cmd"),
        ("- x", [], "- x"),
    ],
)
def test_split(line: str, options: list[tuple[str, str | None]], command: str) -> None:
    if line.startswith("--nod "):
        with pytest.raises(UsageError, match=r"ambiguous.*--nodefile, --nodelist, --nodes"):
            split(line.split(), FLAGS)
        return
    cmd = split(line.split(), FLAGS)
    assert [(o.name, o.value) for o in cmd.srun] == options
    assert list(cmd.command) == command.split()
    typed = line.split()[: len(line.split()) - len(cmd.command)]
    assert cmd.argv() == [word for word in typed if word != "--" or line.startswith("-n --")]


def test_robust_options_are_taken_out_anywhere() -> None:
    cmd = split(
        [
            "--robust-spares=1",
            "-N4",
            "--robust-no-auto",
            "-l",
            "--robust-max-restarts",
            "5",
            "cmd",
            "--robust-x",
        ],
        FLAGS,
    )
    assert cmd.robust == {
        "robust-spares": "1",
        "robust-no-auto": None,
        "robust-max-restarts": "5",
    }
    assert cmd.argv() == ["-N4", "-l"]
    assert cmd.command == ("cmd", "--robust-x")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--robust-spare=1 cmd", r"unknown option --robust-spare; did you mean --robust-spares\?"),
        ("--robustly cmd", "unknown option --robustly;"),
        ("--robust-spares", "--robust-spares needs a value"),
        ("--robust-no-auto=1 cmd", "takes no value"),
        ("-n", r"-n \(--ntasks\) needs a value"),
        ("--ntasks", "--ntasks needs a value"),
        ("-N2", "no command given"),
        ("", "no command given"),
        ("-n1 a : -n2 b", "heterogeneous job components are not supported"),
        ("--mem-b x cmd", None),
        ("--mem-p x cmd", "ambiguous: write one of --mem-per-cpu, --mem-per-gpu"),
    ],
)
def test_errors(line: str, text: str | None) -> None:
    if text is None:
        assert [o.value for o in split(line.split(), FLAGS).srun] == ["x"]
        return
    with pytest.raises(UsageError, match=text):
        split(line.split(), FLAGS)


@pytest.mark.parametrize("line", ["--help", "-h", "--usage", "-V", "--vers", "--mpi=list", "-lV x"])
def test_informational(line: str) -> None:
    assert split(line.split(), FLAGS).informational


def test_robust_help_needs_no_command() -> None:
    assert split(["--robust-help"], FLAGS).robust == {"robust-help": None}


def test_changes_keep_the_other_words() -> None:
    cmd = split(["-vlu", "-N4", "--label", "-n", "8", "cmd"], FLAGS)
    assert cmd.without(["label"]).argv() == ["-v", "-u", "-N4", "-n", "8"]
    assert cmd.with_option("nodes", "5").argv() == ["-vlu", "--label", "-n", "8", "--nodes=5"]
    assert cmd.with_option("no-kill").argv()[-1] == "--no-kill"
    last = split(["-N1", "-N2", "x"], FLAGS).get("nodes")
    assert last is not None and last.value == "2"
    assert cmd.get("mem") is None


# ---------------------------------------------------------------- against the C library

_LIBC = ctypes.CDLL(None)


class _CLongOption(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("has_arg", ctypes.c_int),
        ("flag", ctypes.c_void_p),
        ("val", ctypes.c_int),
    )


_KIND = {"none": 0, "required": 1, "optional": 2}
_NAMES = list(LONG)
_VALUE = {name: 1000 + _NAMES.index(ALIASES.get(name, name)) for name in _NAMES}


def _getopt(words: list[str]) -> tuple[list[tuple[str, str | None]], list[str]] | None:
    """glibc's getopt_long on the same tables; None if it reports an error."""
    table = (_CLongOption * (len(_NAMES) + 1))()
    for entry, name in zip(table, _NAMES, strict=False):
        entry.name, entry.has_arg = name.encode(), _KIND[LONG[name]]
        entry.val = _VALUE[name]
    shorts = "+" + "".join(s + ":" * _KIND[LONG[name]] for s, name in SHORT.items())
    argv = (ctypes.c_char_p * (len(words) + 2))(b"srun", *(w.encode() for w in words), None)
    optind = ctypes.c_int.in_dll(_LIBC, "optind")
    optarg = ctypes.c_char_p.in_dll(_LIBC, "optarg")
    ctypes.c_int.in_dll(_LIBC, "opterr").value = 0
    optind.value = 0
    found: list[tuple[str, str | None]] = []
    while True:
        code = _LIBC.getopt_long(len(words) + 1, argv, shorts.encode(), table, None)
        if code == -1:
            return found, words[optind.value - 1 :]
        if code == ord("?"):
            return None
        name = _NAMES[code - 1000] if code >= 1000 else SHORT[chr(code)]
        value = optarg.value
        found.append((name, None if value is None else value.decode()))


_word = st.one_of(
    st.sampled_from(
        [
            "-l",
            "-u",
            "-lu",
            "-N4",
            "-N",
            "-n8",
            "-n",
            "-K",
            "-K0",
            "-k",
            "-lN",
            "-lK1",
            "-vvl",
            "--label",
            "--nodes",
            "--nodes=4",
            "--output=x",
            "--kill-on-bad-exit",
            "--kill-on-bad-exit=0",
            "--pty",
            "--cpu-bind",
            "--cpu_b",
            "--mem",
            "--me",
            "--out",
            "--tasks-per",
            "--container-i",
            "--",
            "-",
            "x",
            "cmd",
            "a=b",
            "-e",
            "-J",
        ]
    ),
    st.builds(lambda n, i: "--" + n[: i + 1], st.sampled_from(_NAMES), st.integers(0, 12)),
    st.builds(lambda n: f"--{n}=v", st.sampled_from(_NAMES)),
)


@given(st.lists(_word, max_size=6))
def test_agrees_with_getopt_long(words: list[str]) -> None:
    words = [*words, "END"]
    expected = _getopt(words)
    try:
        cmd = split(words, FLAGS)
    except UsageError:
        # a value that is missing, or END taken as one, leaves no command
        assert expected is None or not expected[1]
        return
    if expected is not None:
        assert [(o.name, o.value) for o in cmd.srun] == expected[0]
        assert list(cmd.command) == expected[1]
    if "--" not in words:
        assert cmd.argv() + list(cmd.command) == words


@given(st.lists(_word, max_size=6))
def test_emitted_words_mean_the_same(words: list[str]) -> None:
    try:
        cmd = split([*words, "END"], FLAGS)
    except UsageError:
        return
    again = split([*cmd.argv(), "END"], FLAGS)
    assert again.srun == cmd.srun
    for name in {option.name for option in cmd.srun}:
        rest = split([*cmd.without([name]).argv(), "END"], FLAGS)
        kept = [(o.name, o.value) for o in cmd.srun if o.name != name]
        assert [(o.name, o.value) for o in rest.srun] == kept


# ---------------------------------------------------------------- against the installed srun


@pytest.mark.skipif(shutil.which("srun") is None, reason="needs srun")
def test_table_has_all_of_srun_help(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    run = subprocess.run(
        ["srun", "--help"],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    # A value is shown as "=v" or "[=v]", or not at all where it is rarely used.
    found = re.findall(r"^  (?:-(\w)[, ] |    )--([a-z_-]+)(\[?=)?", run.stdout, re.MULTILINE)
    assert len(found) > 80
    for letter, name, value in found:
        assert name in LONG, name
        assert not letter or SHORT[letter] == name
        assert value != "[=" or LONG[name] == "optional", name
        assert value != "=" or LONG[name] != "none", name
        if not value and LONG[name] == "required":
            assert name == "container"


# ---------------------------------------------------------------- options and environment


@pytest.mark.parametrize(
    ("line", "env", "expected"),
    [
        ("", {}, {"ntasks_cli": None, "label": False, "kill_on_bad_exit": None}),
        ("-n8", {"SLURM_NTASKS": "4"}, {"ntasks_cli": 8, "ntasks_env": 4}),
        ("", {"SLURM_NPROCS": "3"}, {"ntasks_env": 3}),
        ("", {"SLURM_NPROCS": "3", "SLURM_NTASKS": "4"}, {"ntasks_env": 4}),
        ("-N 2-4", {"SLURM_NNODES": "6"}, {"nodes_cli": 2, "nodes_env": 6}),
        ("-N 1k", {"SLURM_JOB_NUM_NODES": "5", "SLURM_NNODES": "6"}, {"nodes_cli": 1024}),
        ("-N 2,4,8", {"SLURM_JOB_NUM_NODES": "5"}, {"nodes_cli": 2, "nodes_env": 5}),
        ("--ntasks-per-node=2", {"SLURM_NTASKS_PER_NODE": "4"}, {"tasks_per_node": 2}),
        ("", {"SLURM_NTASKS_PER_NODE": "4"}, {"tasks_per_node": 4}),
        ("", {"SRUN_CPUS_PER_TASK": "7"}, {"cpus_per_task": 7}),
        ("-l", {}, {"label": True}),
        ("", {"SLURM_LABELIO": ""}, {"label": True}),
        ("", {"SLURM_LABELIO": "1"}, {"label": True}),
        ("", {"SLURM_LABELIO": "Yes"}, {"label": True}),
        ("", {"SLURM_LABELIO": "0"}, {"label": False}),
        ("", {"SLURM_LABELIO": "no"}, {"label": False}),
        ("-o a", {"SLURM_STDOUTMODE": "b"}, {"output": "a"}),
        ("", {"SLURM_STDOUTMODE": "b", "SLURM_STDERRMODE": "c"}, {"output": "b", "error": "c"}),
        ("-K", {}, {"kill_on_bad_exit": 1}),
        ("-K0", {"SLURM_KILL_BAD_EXIT": "1"}, {"kill_on_bad_exit": 0}),
        ("", {"SLURM_KILL_BAD_EXIT": "0"}, {"kill_on_bad_exit": 0}),
        ("-u --pty", {}, {"unbuffered": True, "pty": True}),
        ("", {"SLURM_UNBUFFEREDIO": "1"}, {"unbuffered": True, "pty": False}),
        ("--open-mode=append", {}, {"open_mode": "append"}),
        ("-w n1 -x n2 -r 1", {}, {"exclude": "n2"}),
        ("-m cyclic", {"SLURM_DISTRIBUTION": "block"}, {"distribution": "cyclic"}),
        ("--multi-prog", {}, {"multi_prog": True, "given": frozenset({"multi-prog"})}),
    ],
)
def test_effective(line: str, env: dict[str, str], expected: dict[str, object]) -> None:
    request = effective(split([*line.split(), "cmd"], FLAGS), env)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "env", "text"),
    [
        ("-n x", {}, "--ntasks: 'x' is not a number"),
        ("-N x", {}, "--nodes: 'x' is not a number of nodes"),
        ("", {"SLURM_NTASKS": "-"}, "SLURM_NTASKS"),
    ],
)
def test_effective_errors(line: str, env: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        effective(split([*line.split(), "cmd"], FLAGS), env)
