"""srun's output rules: file patterns, modes and labels."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.numbered_files import as_paths, task_count
from srun_wrapper.command.output_rules import (
    PIECE,
    Labeler,
    Mode,
    PatternContext,
    expand,
    label_width,
    needs_task,
    parse_mode,
)
from srun_wrapper.command.srun_options import split
from srun_wrapper.command.step_request import effective

CONTEXT = PatternContext(
    job_id="123", step_id="4", rank=7, node="n3", node_index=2, user="ada", job_name="train"
)


@pytest.mark.parametrize(
    ("pattern", "name", "per_task"),
    [
        ("out", "out", False),
        ("%j.%s", "123.4", False),
        ("%J", "123.4", False),
        ("%5J", "00123.4", False),
        ("%A_%a", "123_4294967294", False),
        ("%u-%x", "ada-train", False),
        ("%4u", "ada", False),
        ("o-%t", "o-7", True),
        ("o-%4t.log", "o-0007.log", True),
        ("o-%99t", "o-0000000007", True),
        ("o-%0t", "o-7", True),
        ("%N/%2n/%t", "n3/02/7", True),
        ("%8N", "n3", True),
        ("100%%", "100%", False),
        ("%%t", "%t", False),
        ("%%%t", "%7", True),
        ("%%%%t", "%%t", False),
        ("%q%4q", "%q%4q", False),
        ("end%", "end%", False),
        ("end%4", "end%4", False),
        ("a\\%t", "a%t", False),
        ("\\%t-%j\\", "%t-%j", False),
        ("%r%b", "04", False),
    ],
)
def test_expand(pattern: str, name: str, per_task: bool) -> None:
    assert expand(pattern, CONTEXT) == name
    assert needs_task(pattern) is per_task


def test_expand_in_an_array() -> None:
    context = PatternContext(
        "130", "0", 0, "n1", 0, array_job_id="123", array_task_id="17", restart_count="2"
    )
    assert expand("%A_%a_%4a_%b_%r_%j", context) == "123_17_0017_7_2_130"


@given(st.text("%tnN49q\\", max_size=12))
def test_needs_task_is_true_exactly_when_the_name_depends_on_it(pattern: str) -> None:
    one = expand(pattern, PatternContext("1", "0", 1, "a", 1))
    other = expand(pattern, PatternContext("1", "0", 2, "b", 2))
    assert needs_task(pattern) == (one != other)


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, None),
        ("all", None),
        ("ALL", None),
        ("all.log", None),
        ("-", None),
        ("none", None),
        ("None", None),
        ("nonesuch", "nonesuch"),
        ("0", 0),
        ("1.log", "1.log"),
        ("./99", "./99"),
        ("out-%t", "out-%t"),
    ],
)
def test_parse_mode(value: str | None, mode: Mode) -> None:
    assert parse_mode(value) == mode


SPARES = StepPlan(spares=1, world_size=4)


@pytest.mark.parametrize(
    ("words", "env", "plan", "tasks"),
    [
        ("", {}, SPARES, 4),
        ("-n8", {}, StepPlan(), 8),
        ("--ntasks-per-node=4", {}, StepPlan(), 8),
        ("-N1 --ntasks-per-node=4", {}, StepPlan(), 4),
        ("", {"SLURM_NTASKS": "6"}, StepPlan(), 6),
        ("", {}, StepPlan(), 2),
        ("-N1", {"SLURM_NTASKS": "6"}, StepPlan(), None),
        ("--ntasks-per-gpu=1", {}, StepPlan(), None),
    ],
)
def test_tasks_of_the_users_step(
    words: str, env: dict[str, str], plan: StepPlan, tasks: int | None
) -> None:
    request = effective(split([*words.split(), "x"], {}), env)
    assert task_count(request, plan, 2) == tasks


@pytest.mark.parametrize(
    ("words", "env", "ntasks", "typed"),
    [
        ("-n8 --output=99", {}, 8, "-n8 --output=./99"),
        ("-n8 -o 8 -e 7 -i 08", {}, 8, "-n8 -e 7 --output=./8 --input=./08"),
        ("-n8", {"SRUN_ERROR": "9", "SLURM_STDINMODE": "3"}, 8, "-n8 --error=./9"),
        ("--output=99 -e 9.log", {}, None, "--output=99 -e 9.log"),
        ("--output=9.log", {}, 8, "--output=9.log"),
    ],
)
def test_a_number_that_is_no_task_is_a_file(
    words: str, env: dict[str, str], ntasks: int | None, typed: str
) -> None:
    command = split([*words.split(), "x"], {})
    found, request = as_paths(command, effective(command, env), ntasks)
    assert " ".join(found.argv()) == typed
    streams = ("output", "error", "input")
    seen = effective(found, env)
    assert [getattr(request, n) for n in streams] == [getattr(seen, n) for n in streams]


@pytest.mark.parametrize(
    ("ntasks", "width"), [(1, 1), (2, 1), (10, 1), (11, 2), (100, 2), (101, 3)]
)
def test_label_width(ntasks: int, width: int) -> None:
    assert label_width(ntasks) == width


LONG_LINE = b"x" * (PIECE - 1)


@pytest.mark.parametrize(
    ("data", "labelled"),
    [
        (b"", b""),
        (b"a\n", b" 3: a\n"),
        (b"a\n\nb\n", b" 3: a\n 3: \n 3: b\n"),
        (b"a\nb", b" 3: a\n 3: b\n"),
        (b"\r50%\rdone\n", b" 3: \r50%\rdone\n"),
        (LONG_LINE + b"\n", b" 3: " + LONG_LINE + b"\n"),
        (LONG_LINE + b"yz\n", b" 3: " + LONG_LINE + b"y\n 3: z\n"),
        (LONG_LINE + b"y\n", b" 3: " + LONG_LINE + b"y\n 3: \n"),
        (LONG_LINE + b"y", b" 3: " + LONG_LINE + b"y\n"),
    ],
)
def test_label(data: bytes, labelled: bytes) -> None:
    label = Labeler(2, 3)
    assert label(data) + label(b"") == labelled


def test_a_partial_line_waits_for_its_end() -> None:
    label = Labeler(1, 0)
    assert label(b"loss") == b""
    assert label(b" 2.5\nloss") == b"0: loss 2.5\n"
    assert label(b"") == b"0: loss\n"
    assert label(b"") == b""


def test_unbuffered_labels_what_there_is() -> None:
    label = Labeler(1, 0, unbuffered=True)
    assert label(b"loss") == b"0: loss\n"
    assert label(b" 2.5\nx") == b"0:  2.5\n0: x\n"


_stream = st.lists(st.sampled_from([b"a", b"\n", b"bc\nd", b"x" * 700, b"y" * 1024]), max_size=12)


@given(_stream, st.lists(st.integers(0, 9000), max_size=6))
def test_the_result_does_not_depend_on_how_the_bytes_arrive(
    parts: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(parts)
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    once, many = Labeler(1, 0), Labeler(1, 0)
    whole = once(data) + once(b"") if data else b""
    assert b"".join(many(piece) for piece in pieces) + many(b"") == whole
    assert all(line.startswith(b"0: ") for line in whole.splitlines())
    assert whole.replace(b"0: ", b"").replace(b"\n", b"") == data.replace(b"\n", b"")
