"""The reader: labels, times, colours; any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srun_wrapper.signatures.lines import LogLine, read_lines
from srun_wrapper.signatures.verdict import judge


def only(text: str) -> LogLine:
    return read_lines(text)[0]


@pytest.mark.parametrize(
    ("raw", "text", "rank", "task", "node"),
    [
        ("3: KeyError: 'x'", "KeyError: 'x'", None, 3, ""),
        ("[rank3]: KeyError: 'x'", "KeyError: 'x'", 3, None, ""),
        ("[default5]:KeyError: 'x'", "KeyError: 'x'", 5, None, ""),
        ("1: [rank3]: KeyError", "KeyError", 3, 1, ""),
        ("(n2) KeyError", "KeyError", None, None, "n2"),
        ("(Worker pid=12, ip=10.0.0.7) KeyError", "KeyError", None, None, "10.0.0.7"),
        ("[1,4]<stderr>:KeyError", "KeyError", 4, None, ""),
        ("n2:123:456 [0] NCCL WARN x", "NCCL WARN x", None, None, "n2"),
        ("\x1b[31m[rank1]:\x1b[0m KeyError", "KeyError", 1, None, ""),
        ("10%|# | 1/9 [00:01]\r\x1b[ATraceback", "Traceback", None, None, ""),
        ("May  1 10:30:58 n2 kernel: NVRM: Xid", "kernel: NVRM: Xid", None, None, "n2"),
        ("n2 kernel: NVRM: Xid", "kernel: NVRM: Xid", None, None, "n2"),
        ("Linux kernel: 5.4", "Linux kernel: 5.4", None, None, ""),
        (
            "(W pid=1) ERROR 05-01 10:00:00 [core.py:58] KeyError: 'x'",
            "KeyError: 'x'",
            None,
            None,
            "",
        ),
        ("2024-05-01 10:00:00 | ERROR    | t:main:12 - KeyError", "KeyError", None, None, ""),
        ("> [rank3]: KeyError", "KeyError", 3, None, ""),
        (
            "  | 2024-05-01T10:00:00.123-07:00 | n2:1:2 [0] NCCL WARN x",
            "NCCL WARN x",
            None,
            None,
            "n2",
        ),
        ("[2024-05-01 10:00:00 TP5] KeyError", "KeyError", None, None, ""),
        ("stderr: [rank3]: KeyError", "KeyError", 3, None, ""),
        (
            "['python', 'a.py'] exits with return code = -9",
            "[] exits with return code = -9",
            None,
            None,
            "",
        ),
        ("2024-05-01T10:00:00.123Z [rank0]: KeyError", "KeyError", 0, None, ""),
        ("[2024-05-01 10:00:00,123] KeyError", "KeyError", None, None, ""),
    ],
)
def test_labels_are_taken_off(
    raw: str, text: str, rank: int | None, task: int | None, node: str
) -> None:
    line = only(raw)
    assert (line.text, line.rank, line.task, line.node) == (text, rank, task, node)


def test_times_of_several_forms_are_one_clock() -> None:
    lines = read_lines(
        "[2024-05-01 10:00:00,123] start\n"
        "[rank1]:[E501 10:00:05.912345678 ProcessGroupNCCL.cpp:607] late\n"
        "May  1 10:00:09 n2 kernel: later\n"
        "[Wed May  1 10:00:11 2024] last"
    )
    first = lines[0].at or 0
    assert [round((line.at or 0) - first) for line in lines] == [0, 5, 9, 11]


def test_nodes_of_ranks_come_from_nccl_srun_and_torchruns_table() -> None:
    log = (
        "n1:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 4 cudaDev 0 - Init COMPLETE\n"
        "[rank0]: A\n2: B\nsrun: error: n2: task 2: Exited with exit code 1\n"
        "  host      : n3\n  rank      : 3 (local_rank: 1)\n[rank3]: C"
    )
    found = {line.text: line.node for line in read_lines(log)}
    assert (found["A"], found["B"], found["C"]) == ("n1", "n2", "n3")


def test_a_kernel_log_read_at_a_prompt_is_that_hosts() -> None:
    log = (
        "[u@login ~]$ cat slurm.out\nKeyError: 'x'\nroot@node1:~# dmesg -T | grep NVRM\n"
        "[Fri Apr  5 21:29:39 2024] NVRM: Xid (PCI:0000:a1:00): 79, GPU has fallen off the bus."
    )
    assert [line.node for line in read_lines(log)] == ["", "", "", "node1"]


def test_pdsh_labels_are_hosts_but_words_are_not() -> None:
    log = "\n".join(["gpu-017: x"] * 3 + ["gpu0: y"] * 3)
    assert {(line.node, line.text) for line in read_lines(log)} == {
        ("gpu-017", "x"),
        ("", "gpu0: y"),
    }


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("[]():<>0123456789 rankXid:-.\r\n\x1b[mE%|/"), max_size=300)
)
def test_no_text_breaks_the_reader(text: str) -> None:
    assert len(read_lines(text)) == text.count("\n") + 1
    judge(text)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=300))
def test_unknown_text_evicts_nobody(text: str) -> None:
    assert judge(text).evict == ()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "part", ["n1-", "a.", "[", "@a", "(a) ", "1", "Error: ", "loss is ", " ", "> ", "['", "+ "]
)
def test_a_very_long_line_takes_no_long_time(part: str) -> None:
    judge(part * 30_000)
