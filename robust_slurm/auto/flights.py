"""Gives torch's flight recorder to robust-task when the job makes no step.

torch keeps the last collectives of each process (torch.distributed's "flight recorder": sequence
number, operation, sizes, state). A thread waits on a socket beside the heartbeat's record; it is
there only in ranks that have process groups at their first step. It answers each connection with
one line about the rank and one line of JSON for each of torch's recorders: NCCL has one of its own.
torch's other dump is a pickle, which nobody should read.

The thread needs the interpreter's lock: a main thread that waits in a collective has released it.
One that holds it for ever, in C, gets no answer sent.

Runs in the rank: standard library only, Python 3.9 syntax. Whatever fails here, the rank goes on.
"""

from __future__ import annotations

import sys

from robust_slurm.auto.listen import listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

SUFFIX = ".calls"  # of the socket beside a record of the heartbeat (``layout.beside``)
_C10D = "torch.distributed.distributed_c10d"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # torch 2.5 and later; 2.8 and later
_SEND = 2.0  # s for robust-task to take the answer
since = 0
"""Wall-clock time, in ns, from which on this process is of its epoch; see ``rejoin``."""


def offer(path: str) -> None:
    """Listen, if this process has process groups and its torch can dump JSON."""
    try:
        c10d: Any = sys.modules.get(_C10D)
        native: Any = sys.modules.get("torch._C._distributed_c10d")
        if c10d is None or not c10d._world.pg_map:
            return
        if not any(hasattr(native, name) for name in _DUMPS):
            return
        listen(path, 2, _wait, c10d, native)
    except Exception:  # noqa: BLE001 - then a hang is located without the recorder
        return


def _wait(line: socket.socket, c10d: Any, native: Any) -> None:
    while True:
        try:
            asker, _ = line.accept()
        except OSError:
            return
        try:
            asker.settimeout(_SEND)
            asker.sendall(_answer(c10d, native))
        except Exception:  # noqa: BLE001 - the asker has a deadline of its own
            pass
        finally:
            asker.close()


def _answer(c10d: Any, native: Any) -> bytes:
    import json
    import time

    head: dict[str, Any] = {"rank": c10d.get_rank(), "now": time.time_ns(), "since": since}
    head["groups"] = _members(c10d)
    lines = [json.dumps(head).encode()]
    for name in _DUMPS:
        dump = getattr(native, name, None)
        if dump is not None:
            text = dump()
            lines.append(text if isinstance(text, bytes) else str(text).encode())
    return b"\n".join(lines) + b"\n"


def _members(c10d: Any) -> dict[str, int]:
    """A number made of the ranks of each process group, by the group's name.

    Older versions of torch give one name to all groups that split_group makes at a time. What
    torch does not tell is left out.
    """
    import zlib

    found = {}
    try:
        for group, ranks in list(c10d._world.pg_group_ranks.items()):
            found[str(c10d._world.pg_names[group])] = zlib.crc32(repr(sorted(ranks)).encode())
    except Exception:  # noqa: BLE001 - an unusual torch: groups are told apart by name alone
        return {}
    return found
