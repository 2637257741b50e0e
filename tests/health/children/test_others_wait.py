"""The look for a thread of a node that waits for a file server or a user's process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from health.children import child, others_wait
from robust_slurm import process_stat


def node(
    threads: dict[int, tuple[str, str]], slow_s: float = 0.0
) -> tuple[Callable[[str], list[str]], Callable[[str], str]]:
    """A process with these threads: where each waits, and its state."""

    def names(path: str) -> list[str]:
        return [str(one) for one in threads] if path.endswith("/task") else ["self", "7"]

    def text(path: str) -> str:
        time.sleep(slow_s)
        _, name = path.rsplit("/", 1)
        channel, state = threads[int(path.split("/")[-2])]
        return channel if name == "wchan" else f"7 (a) b) {state} 1 7"

    return names, text


@pytest.mark.parametrize(
    ("channel", "state", "waits"),
    [
        ("0", "R", False),
        ("futex_wait", "S", False),
        ("request_wait_answer", "S", True),
        ("handle_userfault", "S", True),
        ("nfs_wait_bit_killable", "D", True),
        ("rpc_wait_bit_killable", "D", True),
        ("nfs41_callback_svc", "S", False),  # a thread of the client that has nothing to do
        ("ldlm_bl_thread_main", "I", False),
        ("uvm_va_space_destroy", "D", False),
    ],
)
def test_waits(channel: str, state: str, waits: bool) -> None:
    threads = {7: ("futex_wait", "S"), 8: (channel, state)}
    assert others_wait.others_wait(*node(threads)) == waits


def test_a_node_with_too_many_threads_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others_wait, "_LOOK_S", 0.1)
    began = time.monotonic()
    many = dict.fromkeys(range(1000), ("futex_wait", "S"))
    assert others_wait.others_wait(*node(many, 0.01))
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("others", "said"),
    [(False, "state D in nv_open (driver nvidia)"), (True, f"state D in nv_open {child.OTHERS}")],
)
def test_a_driver_is_named_only_while_nobody_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, others: bool, said: str
) -> None:
    found = process_stat.read(1)._replace(state="D")
    monkeypatch.setattr(child.process_stat, "read", lambda pid: found)
    monkeypatch.setattr(child, "_channel", lambda pid: "nv_open")
    monkeypatch.setattr(child, "_stack", lambda pid: "[<0>] nv_open+0x1/0x2 [nvidia]")
    monkeypatch.setattr(child, "others_wait", lambda: others)
    assert child.where_it_hangs(1) == said
