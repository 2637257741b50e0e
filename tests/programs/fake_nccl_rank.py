"""A rank with fake NCCL communicators: a stub stands for torch.distributed.distributed_c10d.

It writes what happens to it, in order, into the file ``log``. Arguments: the log, then any of:
handler (it handles SIGTERM), stuck (the abort never returns), gloo (no NCCL).
"""

import os
import signal
import sys
import time
import types

import robust_slurm

log, *words = sys.argv[1:]


def note(text: str) -> None:
    with open(log, "a") as file:
        file.write(text + "\n")


class FakeNccl:
    def _group_start(self) -> None:
        note("group start")

    def _group_end(self) -> None:
        note("group end")

    def abort(self) -> None:
        note("abort")
        if "stuck" in words:
            time.sleep(600)


class FakeGroup:
    def __init__(self) -> None:
        self.backend = FakeNccl()

    def _get_backend(self, _device: object) -> FakeNccl:
        return self.backend


c10d = types.ModuleType("torch.distributed.distributed_c10d")
groups = [FakeGroup(), FakeGroup()]
kind = "gloo" if "gloo" in words else "nccl"
c10d._world = types.SimpleNamespace(  # type: ignore[attr-defined]
    pg_map=dict.fromkeys(groups, (kind, None)),
    pg_names={group: str(number) for number, group in enumerate(groups)},
    pg_backend_config={},
)
torch = types.ModuleType("torch")
torch.device = str  # type: ignore[attr-defined]
for module in (torch, types.ModuleType("torch.distributed"), c10d):
    sys.modules[module.__name__] = module
if "handler" in words:
    signal.signal(signal.SIGTERM, lambda _number, _frame: note("SIGTERM"))
robust_slurm.beat(1)
print("ready", os.getpid(), file=sys.stderr, flush=True)
try:
    while True:
        time.sleep(0.02)
finally:
    note("finally: a save that would be cut off")
