"""A function at idle priority: the caller keeps its own, and gets what a thread has for itself."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import REPOSITORY

HEAD = """
import json, os, sys
from robust_slurm.auto.idle.thread import run_idle
"""
PRIORITIES = """
def priority():
    try:
        with open("/proc/self/autogroup") as file:
            group = file.read().split()[-1]
    except OSError:
        group = None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return [os.sched_getscheduler(0), nice, sorted(os.sched_getaffinity(0)), group]

found = {"before": priority(), "inside": run_idle(priority, session=True), "after": priority()}
found["threads"] = len(os.listdir("/proc/self/task"))
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.setsid()
    os.write(writer, json.dumps(priority()).encode())
    os._exit(0)
os.waitpid(child, 0)
found["rank"] = json.loads(os.read(reader, 1000))
print(json.dumps(found))
"""
CARRIED = """
import ctypes, decimal, signal, sys, threading
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace

old, new = threading.local(), ContextVar("new")
old.value = "own"

class Local(threading.local):
    def __init__(self):
        self.value = "first"

def work():
    global made
    made = Local()
    made.value = old.value = "changed"
    new.set("set")
    decimal.getcontext().prec = 7
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is before is signal.SIG_DFL
    assert signal.signal(signal.SIGUSR2, before) is signal.SIG_IGN
    mode = ctypes.create_string_buffer(64)
    library.fegetenv(mode)
    if sys.argv[1] == "x86_64":  # flush to zero, as what is built with -ffast-math does when loaded
        mode[29] = bytes([mode[29][0] | 0x80])
        library.fesetenv(mode)
    sys.modules.update({"numpy": numpy, "torch": torch, "torch._inductor.cudagraph_trees": trees})
    numpy.seterr(divide="raise")
    trees.local = threading.local()
    trees.local.trees = "kept"

numpy, torch, trees, errors, stashed = *map(ModuleType, ("numpy", "torch", "trees")), {}, []
numpy.geterr = lambda: errors[threading.get_ident()]
numpy.seterr = lambda **how: errors.update({threading.get_ident(): how})
torch._C = SimpleNamespace(_stash_obj_in_tls=lambda *what: stashed.append(
    [*what, threading.current_thread() is threading.main_thread()]))
library, set_handler = ctypes.CDLL(None), signal.signal
run_idle(work)
print(json.dumps({
    "new": new.get(), "old": old.value, "made": made.value, "decimal": decimal.getcontext().prec,
    "signals": [int(signal.getsignal(number)) for number in (signal.SIGUSR1, signal.SIGUSR2)],
    "tiny": sys.float_info.min / 2, "set_handler": signal.signal is set_handler,
    "numpy": errors[threading.get_ident()], "stashed": stashed,
    "main": threading.current_thread() is threading.main_thread(),
}))
"""
REFUSED = """
import types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.is_grad_enabled = lambda: True
def work():
    torch.is_grad_enabled = lambda: False
def processors():
    os.sched_setaffinity(0, [])
def device():
    torch._C = types.SimpleNamespace(_len_torch_function_stack=lambda: 1)
def trace():
    torch._C = None
    sys.settrace(lambda *_: None)
def lost():
    raise SystemExit(3)
for each in (work, processors, lost, device, trace):
    torch.is_grad_enabled = lambda: True
    try:
        run_idle(each)
    except BaseException as error:
        print(type(error).__name__, error)
"""


def run(text: str, *words: str, **more: Any) -> str:
    env = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", HEAD + text, *words]
    done = subprocess.run(
        command, env=env, cwd="/", capture_output=True, text=True, check=False, **more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_user_without_privileges_gets_ranks_of_usual_priority() -> None:
    """He could not take a thread of his out of SCHED_IDLE."""
    user: dict[str, Any] = {"start_new_session": True}
    if os.getuid() == 0 and not str(Path(sys.executable).resolve()).startswith("/root/"):
        user |= {"user": 65534, "group": 65534, "extra_groups": ()}
    found = json.loads(run(PRIORITIES, **user))
    before = found["before"]
    assert found["after"] == found["rank"] == before
    assert found["inside"][0] == os.SCHED_IDLE
    assert found["inside"][1:3] == before[1:3], "a library counts the processors when it is loaded"
    assert found["inside"][3] == (None if before[3] is None else "19")
    assert found["threads"] == 1


def test_what_a_thread_has_for_itself_is_carried_over() -> None:
    found = json.loads(run(CARRIED, platform.machine()))
    assert found.pop("signals") == [1, 0]
    assert found.pop("tiny") == (0.0 if platform.machine() == "x86_64" else sys.float_info.min / 2)
    assert found == {
        "new": "set", "old": "own", "made": "changed", "decimal": 7, "set_handler": True,
        "main": True, "numpy": {"divide": "raise"}, "stashed": [["trees", "kept", True]],
    }  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    torch, processors, lost, device, trace = run(REFUSED).splitlines()
    assert torch.startswith("RuntimeError importing changes torch.is_grad_enabled()")
    assert processors.startswith("OSError")
    assert lost == "SystemExit 3"
    assert device.startswith("RuntimeError importing sets a mode of torch")
    assert trace.startswith("RuntimeError importing traces its thread")


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("import sqlite3\ncache = sqlite3.connect(':memory:')\n", "opens a database"),
        ("import asyncio\nasyncio.get_event_loop_policy().get_event_loop()\n", "main thread"),
        ("import signal\nsignal.set_wakeup_fd(-1)\n", "main thread"),
    ],
)
def test_an_import_that_is_another_one_in_a_thread_is_refused(
    tmp_path: Path, module: str, refused: str
) -> None:
    (tmp_path / "opens.py").write_text(module)
    text = f"""
from robust_slurm.auto.importing import import_all
sys.path.insert(0, {str(tmp_path)!r})
try:
    names = [("opens", {str(tmp_path / "opens.py")!r})]
    run_idle(lambda: import_all(names, ["opens"]))
except RuntimeError as error:
    print(error)
"""
    assert refused in run(text)
