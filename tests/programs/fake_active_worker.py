"""Stands in for an interpreter with a worker: speaks the protocol, measures nothing.

FAKE_WORKER says what it does. Started by robust-health test as an interpreter would be.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support" / "active"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fake_test_worker import SILENT, Spoken, connect, introduce, passed, work

from health.active.coordinator import start

SPEEDS = {"gemm": {"fp32_tflops": 2.5}, "memory": {"memory_gbps": 20.0}, "local": {}}


def answer(task: dict[str, Any]) -> Any:
    kind, test = os.environ["FAKE_WORKER"], str(task["test"])
    node = os.environ["ROBUST_TEST_NODE"]
    if kind == "hangs":
        Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
        return SILENT
    if kind == "wrong" and test == "gemm" and node in ("n1", "n2"):
        return passed(task, wrong=["row 3 differs from the first product"])
    return passed(task, values=SPEEDS[test]) if test in SPEEDS else passed(task)


async def main() -> None:
    if "health.active.coordinator.start" in sys.argv:
        os.environ.update(start.task_env(os.environ))
    kind, env = os.environ["FAKE_WORKER"], os.environ
    print("the worker says hello", flush=True)
    if kind == "absent":
        sys.exit("No module named health")
    if kind == "unable":
        said: Spoken = await connect(env)
        said.say({"hello": {"node": env["ROBUST_TEST_NODE"], "local": 0, "pid": 1}})
        said.say({"unable": "torch cannot be imported: No module named 'torch'"})
        await said.hear()
        return
    await work(await introduce(env), answer)


asyncio.run(main())
