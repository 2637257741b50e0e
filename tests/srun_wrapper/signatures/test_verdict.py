"""The decider: the traps of real logs, one by one, and the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.diagnosis import Totals, score, wrong
from srun_wrapper.signatures.verdict import judge

DATA = Path(__file__).parents[2] / "data" / "failures"
XID79 = "kernel: NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus."
CANCELLED = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2024-05-01T10:31:40 DUE TO {} ***"
PREEMPTED = CANCELLED.format("PREEMPTION")
WORK = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType={}, NumelIn={}, "


def work(rank: int, seq: int, op: str, size: int) -> str:
    head = f"[rank{rank}]:[E501 10:00:00.123456789 ProcessGroupNCCL.cpp:1] [Rank {rank}] "
    return (
        head + WORK.format(seq, op, size) + "NumelOut=1, Timeout(ms)=600000) ran for 1 milliseconds"
    )


def test_hardware_errors_after_a_preemption_are_its_noise() -> None:
    verdict = judge(f"May  1 10:31:39 n3 {XID79}\n" + PREEMPTED)
    assert (verdict.layer, verdict.blame, verdict.evict) == ("preemption", "external", ())


def test_the_only_node_of_a_log_is_to_be_tested_where_the_error_names_none() -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    one = judge(f"n2:1:1 [0] NCCL INFO Connected\n{error}")
    two = judge(f"n2:1:1 [0] NCCL INFO Connected\nn3:1:1 [0] NCCL INFO Connected\n{error}")
    assert (one.suspects, one.evict, two.suspects) == (("n2",), (), ())


def test_a_gpu_that_failed_long_before_the_preemption_is_named() -> None:
    verdict = judge(f"May  1 09:10:00 n3 {XID79}\n" + PREEMPTED)
    assert verdict.evict == ("n3",)


def test_the_same_symptom_on_two_nodes_evicts_nobody() -> None:
    verdict = judge(f"May  1 10:00:00 n3 {XID79}\nMay  1 10:00:00 n4 {XID79}")
    assert (verdict.layer, verdict.blame, verdict.evict) == ("gpu_hardware", "external", ())


def test_transfers_that_all_name_one_peer_suspect_it_and_evict_nobody() -> None:
    verdict = judge(
        "\n".join(
            f"{n}:1:1 [0] NCCL WARN NET/IB : Got completion from peer n9<4> with status=12"
            for n in ("n1", "n2", "n4")
        )
    )
    assert (verdict.layer, verdict.suspects, verdict.evict) == ("ib", ("n9",), ())


@pytest.mark.parametrize(
    ("lines", "layer"),
    [
        ([work(rank, 9, "ALLREDUCE", 4 if rank == 1 else 8) for rank in range(3)], "user_code"),
        ([work(0, 9, "ALLREDUCE", 8), work(1, 9, "ALLREDUCE", 8)], "unknown"),
        ([work(0, 9, "ALLREDUCE", 8), work(1, 8, "BROADCAST", 4)], "unknown"),  # another call
        ([work(0, 9, "SEND", 8), work(1, 9, "RECV", 8)], "unknown"),
    ],
)  # fmt: skip
def test_a_collective_of_another_size_is_the_program(lines: list[str], layer: str) -> None:
    assert judge("\n".join(lines)).layer == layer


def test_the_node_that_wrote_node_failure_is_not_the_one_that_failed() -> None:
    text = CANCELLED.format("NODE FAILURE")
    assert judge(text).evict == ()
    assert judge(f"srun: error: Node failure on n7\n{text}").evict == ("n7",)
    assert judge(f"srun: error: Node failure on n[7-8]\n{text}").evict == ()


def test_a_hang_that_runs_into_the_time_limit_is_a_hang() -> None:
    limit = CANCELLED.format("TIME LIMIT")
    assert judge(limit).layer == "scheduler"
    assert judge(f"{work(0, 9, 'ALLREDUCE', 8)}\n{limit}").layer == "unknown"
    assert judge(f"KeyError: 'x'\n{limit}").layer == "user_code"


def test_an_error_that_the_training_survived_is_not_the_cause() -> None:
    steps = "\n".join(f"step {n} loss 2" for n in range(91, 95))
    verdict = judge(f"loss spike detected at step 90\nKeyError: 'retried'\n{steps}\nTypeError: x")
    assert verdict.first is not None and verdict.first.text == "TypeError: x"


@pytest.mark.parametrize("code", [13, 31, 43])
def test_a_users_xid_evicts_nobody(code: int) -> None:
    verdict = judge(f"May  1 10:00:00 n3 kernel: NVRM: Xid (PCI:0000:44:00): {code}, pid=1, x")
    assert (verdict.layer, verdict.blame, verdict.evict) == ("user_code", "user", ())


def test_memory_of_another_process_is_not_the_users() -> None:
    text = (
        "n2:1:1 [0] CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of "
        "79.11 GiB of which 8.31 MiB is free. Process 88123 has 77.90 GiB memory in use. Including "
        "non-PyTorch memory, this process has 1.17 GiB memory in use."
    )
    verdict = judge(text)
    assert (verdict.blame, verdict.suspects, verdict.evict) == ("node", ("n2",), ())
    assert judge(text.replace("1.17 GiB", "77.9 GiB")).blame == "user"


@pytest.mark.parametrize("case", (DATA / "layers.txt").read_text().splitlines())
def test_the_layer_of_a_single_line(case: str) -> None:
    layer, line = case.split("|", 1)
    assert judge(f"step 1\n{line}").layer == layer


@pytest.mark.parametrize("half", ["seen", "held_apart"])
def test_the_corpus(half: str) -> None:
    totals: Totals = score(DATA / half)
    errors = "\n".join(filter(None, map(wrong, totals.scores)))
    assert not totals.false_evictions, errors
    assert totals.share("blame_right") >= 0.95, errors
    assert totals.share("layer_right") >= 0.93, errors
    assert totals.share("first_right") >= 0.93, errors


def test_noise_at_the_start_does_not_hide_the_cause() -> None:
    verdict = judge(
        "slurm_script: line 12: module: command not found\n"
        "slurmstepd: error: couldn't chdir to `/root/x': No such file or directory: going to /tmp\n"
        "'(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443)' thrown\n"
        'Traceback (most recent call last):\n  File "/home/u/x.py", line 3, in f\n'
        '    raise ValueError(f"batch is not divisible by {n}")\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert verdict.layer == "gpu_oom"


def test_a_warning_is_the_first_word_of_the_same_error_that_follows() -> None:
    warning = (
        "[W socket.cpp:436] failed to bind to [::]:29500 (errno: 98 - Address already in use)."
    )
    error = (
        "[E socket.cpp:472] failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use)."
    )
    both, alone = judge(f"start\n{warning}\n{error}"), judge(f"{warning}\nValueError: x")
    assert (both.first and both.first.number, alone.layer) == (2, "user_code")


def test_what_a_program_says_of_an_unknown_error_comes_before_its_launchers_report() -> None:
    verdict = judge("RUN ERROR: no mesh\nsrun: error: n1: tasks 1-7: Exited with exit code 1")
    assert verdict.first is not None and verdict.first.number == 1
    assert (verdict.layer, verdict.blame, verdict.evict) == ("unknown", "unknown", ())


def test_source_lines_under_two_stack_frames_are_no_errors() -> None:
    verdict = judge(
        "Traceback (most recent call last):\n"
        '  File "a.py", line 2, in <module>\n  File "b.py", line 4, in f\n'
        "    rank = int(os.environ[\"LOCAL_RANK\"])\nKeyError: 'LOCAL_RANK'"
    )
    assert verdict.first is not None and verdict.first.number == 5
