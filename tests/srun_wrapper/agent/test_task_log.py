"""Warnings of a robust-task: on stderr as ever, and bounded on the wire."""

from __future__ import annotations

import logging

import pytest

from srun_wrapper.agent import task_log
from srun_wrapper.protocol.messages import Logged, decode_from_agent, encode

log = logging.getLogger("robust-task")


def test_a_warning_goes_both_ways(capfd: pytest.CaptureFixture[str]) -> None:
    sent: list[Logged] = []
    task_log.begin(sent.append)
    log.warning("stdin: broken\n")
    task_log.warn_only("started anew")
    log.info("of no interest")
    assert capfd.readouterr().err == "robust-task: stdin: broken\n"
    assert [line.text for line in sent] == ["stdin: broken\n", "started anew"]
    assert decode_from_agent(encode(sent[0])) == sent[0]


def test_a_warning_of_a_stream_is_robust_sruns_to_print(capfd: pytest.CaptureFixture[str]) -> None:
    sent: list[Logged] = []
    task_log.begin(sent.append)
    task_log.warn_counted("stdout of rank 3", "further output is lost: no space")
    assert capfd.readouterr().err == ""
    said = "stdout of rank 3: further output is lost: no space"
    assert sent == [Logged(0, 30, said, 0, "further output is lost: no space")]
    assert decode_from_agent(encode(sent[0])) == sent[0]


def test_a_file_name_that_is_no_text_can_be_sent() -> None:
    """Past the logger, which pytest listens to: its report with such a name could not be sent."""
    sent: list[Logged] = []
    text = "/data/caf\udce9: no such directory"
    record = log.makeRecord(log.name, logging.WARNING, __file__, 1, text, (), None)
    task_log._ToSupervisor(sent.append).emit(record)
    assert decode_from_agent(encode(sent[0])) == Logged(0, 30, "/data/caf?: no such directory")


def test_a_flood_is_bounded_in_size_and_rate(capfd: pytest.CaptureFixture[str]) -> None:
    sent: list[Logged] = []
    task_log.begin(sent.append)
    for _ in range(50):
        log.warning("x" * 10_000)
    assert len(sent) == task_log.MOST
    assert {len(line.text) for line in sent} == {task_log.LONGEST}
    assert capfd.readouterr().err.count("\n") == 50


def test_what_robust_srun_counts_passes_the_bound() -> None:
    """A loss of output was told nowhere: not on stderr, and not to robust-srun."""
    sent: list[Logged] = []
    task_log.begin(sent.append)
    for _ in range(task_log.MOST + 3):
        task_log.warn_only("no data process")
    task_log.warn_counted("stdout of rank 3", "further output is lost: no space")
    assert [line.trouble for line in sent[task_log.MOST :]] == ["further output is lost: no space"]


def test_left_out_lines_are_counted() -> None:
    bound = task_log.LineBound()
    assert [bound.admit(0.1 * n) for n in range(task_log.MOST)] == [0] * task_log.MOST
    assert [bound.admit(30.0), bound.admit(59.0)] == [None, None]
    assert [bound.admit(60.5), bound.admit(61.0)] == [2, 0]
