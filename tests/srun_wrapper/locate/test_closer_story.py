"""Lines of a closer look, and py-spy's native dump that they come from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srun_wrapper.agent.looking.native import FRAMES, frames
from srun_wrapper.locate.closer_story import GROUPS, LONGEST, CloserView, of_processes

WAIT = "state S in futex_do_wait, futex"
STACK = (
    "libc.so.6",
    "c10d::Work::wait (libtorch_cpu.so)",
    "all_reduce (distributed_c10d.py:9)",
    "a",
)


@pytest.mark.parametrize(
    ("view", "line"),
    [
        pytest.param(CloserView(3, "n2", "", "python", WAIT, STACK),
                     "rank 3 on n2, native: libc.so.6 < c10d::Work::wait (libtorch_cpu.so) < "
                     f"all_reduce (distributed_c10d.py:9) ({WAIT})", id="native"),
        pytest.param(CloserView(3, "n2", "data-loader worker 9", "python", "state D, read of /x",
                                failed="one of its threads waits"),
                     "rank 3 on n2, data-loader worker 9, in the kernel: state D, read of /x "
                     "(no native stack: one of its threads waits)", id="kernel"),
        pytest.param(CloserView(3, "n2", "", "", "", failed="x"),
                     "rank 3 on n2, in the kernel: not known (no native stack: x)", id="gone"),
    ],
)  # fmt: skip
def test_a_process(view: CloserView, line: str) -> None:
    assert of_processes([view]) == (line,)


def test_ranks_that_are_no_python_are_grouped_and_the_few_are_first() -> None:
    views = [
        CloserView(n, f"n{n // 2}", "", "train", WAIT if n != 5 else "state D", python=False)
        for n in range(8)
    ]
    assert of_processes(views) == (
        "rank 5 on n2, no Python (train): state D",
        "ranks 0-4,6-7 on n[0-3], no Python (train): state S in futex_do_wait, futex",
    )
    many = [CloserView(n, f"n{n}", "", "train", f"state {n}", python=False) for n in range(10_000)]
    assert len(of_processes(many)) == GROUPS
    long = CloserView(1, "n1", "", "train", WAIT, ("f" * 300,) * 16)
    assert len(of_processes([long])[0]) <= LONGEST


def thread(tid: int, *names: tuple[str, str, int]) -> dict[str, Any]:
    found = [
        {"name": n, "filename": f"/l/{f}", "short_filename": f, "line": at} for n, f, at in names
    ]
    return {"pid": 7, "os_thread_id": tid, "thread_name": "t", "frames": found}


def test_the_main_threads_frames_without_repeated_addresses() -> None:
    main = thread(
        7,
        ("0x7f37ea602f16", "libc.so.6", 0),
        ("0x7f37ea60d116", "libc.so.6", 0),
        ("cuEventSynchronize", "libcuda.so.1", 0),
        ("synchronize", "torch/cuda/__init__.py", 40),
    )
    assert frames(json.dumps([thread(8, ("x", "y", 1)), main]), 7) == (
        "libc.so.6",
        "cuEventSynchronize (libcuda.so.1)",
        "synchronize (torch/cuda/__init__.py:40)",
    )
    deep = thread(7, *[(f"f{n}", "l", 0) for n in range(99)])
    assert len(frames(json.dumps([deep]), 7)) == FRAMES


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"os_thread_id":7}]', "[[]]", "[" * 99_999])
def test_what_is_no_dump_has_no_frames(text: str) -> None:
    assert frames(text, 7) == ()
