"""The processes of a slot and their dumps become roles, stacks, reasons, sizes."""

from __future__ import annotations

import json
import os
from mmap import PAGESIZE
from pathlib import Path

import msgspec
import pytest

from srun_wrapper.agent.looking import dumps, fallback, kernel, sampler
from srun_wrapper.agent.looking.bounds import MOST, bounded, budget
from srun_wrapper.agent.looking.dumps import stacks, why
from srun_wrapper.agent.looking.roles import TreeProcess, roles, seen_role
from srun_wrapper.protocol.looking_messages import (
    LAUNCHER,
    LOADER,
    OTHER,
    RANK,
    Look,
    ThreadStack,
)

SLOT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


def inner(rank: int, run: str = "none") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(rank % 4)} | (
        {"TORCHELASTIC_RUN_ID": run} if run else {}
    )


def process(
    pid: int, parent: int, environ: dict[str, str] = SLOT, python: bool = True
) -> TreeProcess:
    return TreeProcess(pid, parent, "S", python, environ)


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ([process(10, 1), process(11, 10), process(12, 10)], {10: RANK, 11: OTHER, 12: OTHER}),
        ([process(10, 1, python=False), process(11, 10), process(12, 11)], {11: RANK, 12: OTHER}),
        (  # torchrun, its ranks, and a worker of one
            [process(10, 1), process(13, 10, inner(5)), process(14, 13, inner(5)),
             process(12, 10, inner(4))],
            {12: RANK, 13: RANK, 10: LAUNCHER, 14: OTHER},
        ),
        (  # ranks that robust-task has forked itself
            [process(13, 1, inner(5)), process(12, 1, inner(4)), process(10, 1)],
            {12: RANK, 13: RANK, 10: LAUNCHER},
        ),
        (  # a launcher that is not torch's
            [process(10, 1), process(12, 10, inner(4, ""))], {12: RANK, 10: LAUNCHER},
        ),
        (  # a shell in torchrun's ranks
            [process(10, 1), process(12, 10, inner(4), python=False), process(13, 12, inner(4))],
            {13: RANK, 10: LAUNCHER},
        ),
        ([process(20, 1), process(10, 1)], {10: RANK, 20: OTHER}),  # 20: an orphan
        ([process(10, 1, python=False)], {}),
        ([], {}),
    ],
)  # fmt: skip
def test_roles(tree: list[TreeProcess], found: dict[int, str]) -> None:
    assert roles(tree, 10) == found
    assert list(roles(tree, 10)) == list(found)  # those that count most first


EVALUATION = inner(0, "") | {"WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("tree", "stepping", "found"),
    [
        # A rank that starts a program with a world of its own.
        ([process(10, 1), process(11, 10, EVALUATION)], {10}, {10: RANK, 11: OTHER}),
        ([process(10, 1), process(11, 10)], {11, 77}, {11: RANK, 10: LAUNCHER}),
        (  # of torchrun's ranks only one beats
            [process(10, 1), process(12, 10, inner(4)), process(13, 10, inner(5))], {12},
            {12: RANK, 13: RANK, 10: LAUNCHER},
        ),
        ([process(9, 1, python=False), process(10, 9)], {10}, {10: RANK}),
    ],
)  # fmt: skip
def test_processes_that_make_steps_are_ranks(
    tree: list[TreeProcess], stepping: set[int], found: dict[int, str]
) -> None:
    assert roles(tree, tree[0].pid, stepping) == found


def test_a_worker_of_a_loader_is_known_by_its_stack() -> None:
    loop = (ThreadStack("main", ("get (q.py:1)", "_worker_loop (worker.py:9)")),)
    assert seen_role(OTHER, loop) == LOADER
    assert seen_role(RANK, loop) == RANK
    assert seen_role(OTHER, (ThreadStack("main", ("f (_worker_loop (.py:1)",)),)) == OTHER
    assert seen_role(OTHER, ()) == OTHER


@pytest.mark.parametrize("value", ["", "-1", "1x", "9" * 20, "²"])
def test_a_number_in_an_environment_is_not_trusted(value: str) -> None:
    look = process(5, 1, {"RANK": value}).seen(RANK, (), "")
    assert (look.rank, look.local) == (-1, -1)


# -- dumps


def thread(os_id: int | None, name: str | None, *functions: str) -> dict[str, object]:
    frames = [
        {"name": f, "filename": "/x/pkg/a.py", "short_filename": "pkg/a.py", "line": n}
        for n, f in enumerate(functions)
    ]
    return {"os_thread_id": os_id, "thread_name": name, "frames": frames}


@pytest.mark.parametrize("name", [None, "MainThread", "other"])
def test_the_main_thread_has_the_pid_of_its_process(name: str | None) -> None:
    dump = json.dumps([thread(8, "MainThread", "g"), thread(7, name, "f", "main")])
    first, second = stacks(dump, 7)
    assert first == ThreadStack("main", ("f (pkg/a.py:0)", "main (pkg/a.py:1)"))
    assert second.thread == "MainThread"


def test_in_another_pid_namespace_its_name_tells() -> None:
    dump = json.dumps([thread(1, None, "g"), thread(2, "MainThread", "f")])
    assert [s.frames[0] for s in stacks(dump, 7)] == ["f (pkg/a.py:0)", "g (pkg/a.py:0)"]


def test_text_of_the_program_is_cleaned_and_cut() -> None:
    dump = json.dumps([thread(7, "\x1b[2J", "f\n\x1b]0;x" + "y" * 5000, *["g"] * 500)])
    (found,) = stacks(dump, 7)
    assert len(found.frames) == dumps.DEPTH and found.thread == "main"
    assert all(frame.isprintable() and len(frame) < 150 for frame in found.frames)


@pytest.mark.parametrize(
    "dump", ["", "{", "3", "[3]", "[{}]", '[{"frames": 3}]', '[{"frames": [{"name": "f"}]}]']
)
def test_what_is_no_dump(dump: str) -> None:
    assert stacks(dump, 7) == ()


@pytest.mark.parametrize(
    ("error", "scope", "said"),
    [
        ("Permission Denied: Try running", "1", "py-spy was refused: kernel.yama.ptrace_scope = 1"),
        ("Error: Operation not permitted", "2", "py-spy was refused: kernel.yama.ptrace_scope = 2"),
        ("Permission denied (os error 13)", "0", "py-spy was refused: no permission"),
        ("Permission denied (os error 13)", None, "py-spy was refused: no permission"),
        ("Error: Failed to find python version", "1", "py-spy found no stack: Error: Failed to"),
    ],
)
def test_a_failed_dump_says_why(
    error: str, scope: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumps, "SCOPE", tmp_path / "scope")
    if scope is not None:
        (tmp_path / "scope").write_text(f"{scope}\n")
    assert why(error).startswith(said)


def fake_py_spy(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = directory / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(dumps, "py_spy", lambda: str(tool))


def test_dumps_have_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump that does not come, and more dumps than may run at a time behind it."""
    monkeypatch.setattr(dumps, "DEADLINE", 0.3)
    fake_py_spy(tmp_path, monkeypatch, "exec sleep 60")
    found = dumps.dump_all(range(100, 112))
    reasons = [dump.failed for dump in found.values()]
    assert sorted(found) == list(range(100, 112))
    assert reasons.count("py-spy had no answer within 0.3 s") == dumps.TOGETHER
    assert reasons.count("not looked at within 0.3 s") == 12 - dumps.TOGETHER


def test_an_empty_dump_is_told_apart_from_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_py_spy(tmp_path, monkeypatch, "echo Permission Denied >&2; exit 1")
    assert dumps.dump_all([7])[7].failed.startswith("py-spy was refused")
    fake_py_spy(tmp_path, monkeypatch, "echo []")
    assert dumps.dump_all([7])[7].failed.startswith("py-spy found no stack")
    monkeypatch.setattr(dumps, "py_spy", lambda: None)
    assert dumps.dump_all([7])[7].failed == dumps.NOT_INSTALLED


def test_an_answer_of_faulthandler() -> None:
    text = (
        "Thread 0x00007f2 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n'
        "\n"
        "Current thread 0x00007f1 [python] (most recent call first):\n"
        '  File "/opt/lib/torch/distributed/distributed_c10d.py", line 3032 in all_reduce\n'
        '  File "<string>", line ??? in <module>\n'
        "no frame\n"
    )
    assert fallback.parse(text) == (
        ThreadStack(
            "main",
            ("all_reduce (torch/distributed/distributed_c10d.py:3032)", "<module> (<string>:0)"),
        ),
        ThreadStack("", ("wait (threading.py:327)",)),
    )
    assert fallback.parse("x") == ()


# -- sizes


def test_what_a_slot_says_is_bounded() -> None:
    frames = tuple(f"function_{n} (some/file.py:{n})" for n in range(40))
    threads = tuple(ThreadStack(f"t{n}", frames) for n in range(9))
    looks = [Look(pid, RANK if pid < 8 else OTHER, "S", pid, pid, threads) for pid in range(48)]
    found = bounded(looks, MOST)
    assert len(msgspec.msgpack.encode(found)) <= MOST + 8
    assert [look.pid for look in found] == list(range(48))
    assert {len(look.stacks) for look in found} == {1}
    assert len(found[0].main()) == 40 and len(found[-1].main()) == 8
    assert bounded(looks[:2], MOST) == tuple(looks[:2])
    assert bounded(looks, 0) == ()
    (bare,) = bounded(looks[:1], 80)
    assert (bare.stacks, bare.failed) == ((), "the stacks of this slot are too long")


@pytest.mark.parametrize(("slots", "most"), [(0, 32768), (1, 32768), (8, 32768), (64, 12288)])
def test_all_slots_of_a_node_fit_in_a_message(slots: int, most: int) -> None:
    assert budget(slots) == most


@pytest.mark.parametrize(
    ("call", "words", "found"),
    [
        ("read", "0x3", "/data/shard"),
        ("fsync", "0x3", "/data/shard"),
        ("read", "0x4", ""),  # a socket
        ("write", "0x5", ""),  # a terminal
        ("flock", "0x3", ""),  # another process holds the lock
        ("openat", "0xffffffffffffff9c 0x40", "/data/next"),
        ("openat", "0xffffff9c 0x60", "/home/ada/part"),
        ("openat", "0x6 0x60", "/data/part"),
        ("openat", "0xffffff9c 0x9999999999999999", ""),
        ("", "999 0x40 0x0 0x0 0x0 0x0 0x0 0x0", ""),  # a call of no file
        ("", "running", ""),
    ],
)
def test_the_file_that_a_process_waits_for(
    tmp_path: Path, call: str, words: str, found: str
) -> None:
    base = tmp_path / "7"
    (base / "fd").mkdir(parents=True)
    for number, target in ((3, "/data/shard"), (4, "socket:[9]"), (5, "/dev/pts/1"), (6, "/data")):
        (base / "fd" / str(number)).symlink_to(target)
    (base / "cwd").symlink_to("/home/ada")
    (base / "mem").write_bytes(b"\0" * 0x40 + b"/data/next".ljust(0x20, b"\0") + b"part\0rest")
    numbers = [n for n, name in kernel.CALLS.items() if name == call]
    padding = "0x0 " * 7
    text = f"{numbers[0]} {words} {padding}" if call else words
    (base / "syscall").write_text(text + "\n")
    assert kernel.waited_file(7, tmp_path) == found
    assert kernel.waited_file(8, tmp_path) == ""


@pytest.mark.parametrize(
    ("at", "path", "read"),
    [
        (PAGESIZE - 8, "/data/x", [PAGESIZE - 8]),  # its zero is the last byte of the page
        (PAGESIZE - 7, "/data/x", [PAGESIZE - 7, PAGESIZE]),
        (64, "/data/x", [64]),
    ],
)
def test_no_page_is_read_that_the_system_call_has_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, path: str, read: list[int]
) -> None:
    """The one behind it may be mapped from a device, or from a file of a dead server."""
    (tmp_path / "mem").write_bytes(bytes(at) + path.encode() + bytes(2 * PAGESIZE))
    seen: list[int] = []
    pread = os.pread

    def note(file: int, size: int, offset: int) -> bytes:
        assert offset % PAGESIZE + size <= PAGESIZE
        seen.append(offset)
        return pread(file, size, offset)

    monkeypatch.setattr(kernel.os, "pread", note)
    assert (kernel._string(tmp_path / "mem", at), seen) == (path, read)


@pytest.mark.parametrize(
    ("role", "state", "device", "file", "noted", "shown"),
    [
        (RANK, "D", "/dev/nvidia0", "", "/dev/nvidia0", "waits for /dev/nvidia0 in state D"),
        (RANK, "D", "", "/data/x", "", "waits for /data/x in state D"),
        (LOADER, "D", "", "/data/x", "", "waits for /data/x in state D"),
        (LOADER, "D", "/dev/nvidia0", "", "", "waits for /dev/nvidia0 in state D"),
        (RANK, "D", "", "", "", ""),
        (RANK, "S", "/dev/nvidia0", "/data/x", "", "its dead"),
        (LOADER, "S", "", "/data/x", "", ""),
        (OTHER, "D", "", "/data/x", "", ""),
    ],
)
def test_what_a_look_notes_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    state: str,
    device: str,
    file: str,
    noted: str,
    shown: str,
) -> None:
    monkeypatch.setattr(kernel, "waited_device", lambda _pid: device)
    monkeypatch.setattr(kernel, "waited_file", lambda _pid: file)
    monkeypatch.setattr(kernel, "killed_children", lambda _pid: "its dead")
    look = Look(7, role, state)
    sampler.note_kernel(look)
    assert (look.device, look.kernel) == (noted, shown)
