"""One random training loop of ``bench.checkpoint.loops.trying``, in forks of this process.

Each line on stdin is an order: the loop, where its result and stderr go, and for a run with a
Checkpointer the store's socket, its epoch and whether it is killed at its crash. Each is answered
with the exit code (or minus the signal) of the fork.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.checkpoint.loops.case import Loop
from bench.checkpoint.loops.training import Training
from robust_slurm import Checkpointer, CheckpointError
from robust_slurm.checkpoint.copying import snapshot


def train(loop: Loop, order: dict[str, Any]) -> dict[str, Any]:
    """Run the loop; the state that it ends with.

    The reference's ``saved`` are the states in which save() would have returned, by its step, and
    ``ended`` those from which the script went on; ``resumed``: the state that resume() gave back.
    ``refusal`` alone: the error by which the Checkpointer refused.
    """
    training = Training(loop)
    began = 0
    found: dict[str, Any] = {"saved": {}, "ended": {}}
    save: Callable[[int], None] = lambda step: found["saved"].update({step: training.state()})  # noqa: E731
    if "socket" in order:
        _slow_down(loop.slow_ms / 1000)
        try:
            training.checkpointer = ckpt = Checkpointer(
                model=training.model, optimizer=training.optimizers, extra=training.extra(),
                loader=training.loader if loop.data in ("loader", "workers") else None,
            )  # fmt: skip
            began, save = ckpt.resume(), ckpt.save
        except (CheckpointError, TypeError) as error:
            traceback.print_exc()
            return {"refusal": f"{type(error).__name__}: {error}"}
        training.tokens = ckpt.extra.get("tokens", 0)
        found = {"resumed": training.state()}
    crash = order.get("crash", False)

    def at(number: int, moment: str) -> None:
        if crash and (number, moment) == (loop.crash_step, loop.crash_at):
            time.sleep(loop.seed % 7 / 1000)
            os.kill(os.getpid(), signal.SIGKILL)

    each = 1 if loop.save_at == "micro" else loop.accumulate  # micro-steps to a save
    for micro in range(began * each, loop.steps * loop.accumulate):
        number, part = micro // loop.accumulate + 1, micro % loop.accumulate
        if micro % each == 0 and "ended" in found:
            found["ended"][micro // each] = training.state()
        if part == 0:
            training.tail(number, "before forward")
        at(number, "forward")
        training.backward(number, part)
        if part < loop.accumulate - 1:
            if loop.save_at == "micro":
                save(micro + 1)
            continue
        at(number, "backward")
        if loop.save_at == "early":
            save(number)
            at(number, "save")
        training.update()
        at(number, "update")
        training.tail(number, "before save")
        if loop.save_at != "early":
            save((micro + 1) // each)
            at(number, "save")
        training.tail(number, "after save")
        at(number, "end")
    state = training.state()
    if training.checkpointer is not None:
        training.checkpointer.close()
    done = {"state": state, "began": began * each // loop.accumulate, "step": began}
    return found | done


def _slow_down(seconds: float) -> None:
    """A copy thread that gets the processor late: this machine is too quick to tear anything."""
    run = snapshot.Copy.run

    def late(copy: snapshot.Copy) -> None:
        time.sleep(seconds)
        run(copy)

    snapshot.Copy.run = late  # type: ignore[method-assign,assignment]


def _in_fork(order: dict[str, Any]) -> int:
    logging.disable(logging.WARNING)
    err = os.open(order["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(err, 2)
    signal.alarm(int(order["deadline"]))
    warnings.simplefilter("ignore")
    if "socket" in order:
        os.environ["ROBUST_CKPT_SOCKET"] = order["socket"]
        os.environ["ROBUST_EPOCH"] = str(order["epoch"])
    try:
        found = train(Loop(**order["loop"]), order)
        with open(order["result"], "w", encoding="utf-8") as file:
            json.dump(found, file)
    except BaseException:  # noqa: BLE001 - the parent's code must not go on here
        traceback.print_exc()
        return 1
    return 0


def _import_compiler() -> None:
    """Compile once, or each fork that compiles imports all of it: 2 s."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.compile(torch.optim.SGD([parameter]).step, backend="eager")()


def main() -> None:
    torch.set_num_threads(1)
    _import_compiler()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            code = _in_fork(order)
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
