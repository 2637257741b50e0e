"""The writer's process, which writes snapshots into the durable tier beside the run.

It reads requests from stdin, one JSON object a line, and answers each with one on stdout: ``write``
and ``commit`` (see ``_write`` and ``_commit``). Writes are done one after the other; commits, which
may have to wait for other ranks, run beside them until ``give_up``, which has no answer. It lives
until stdin is closed or SIGKILL arrives, and ignores other signals: those of a job that ends reach
it too, and the last step is written just then. It touches no GPU, and runs at the lowest priority
only after its imports: a training that keeps all cores busy would delay them until the first
durable steps are late. A request that fails is answered with the reason, and ends nothing.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from .files import DurableError, explain
from .parts import count, is_attempt, text

_MAX_LINE = 64 << 20  # bytes
_MAX_WAIT = 24 * 3600.0  # s
_ENDING = 5.0  # s for commits to be given up at the end
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Reply = dict[str, Any]


class Writer:
    """Answers requests with ``reply``, which is called from several threads."""

    def __init__(self, reply: Callable[[Reply], None]) -> None:
        self._reply = reply
        self._stop = threading.Event()  # of the commits that wait
        self._commits: list[threading.Thread] = []
        self._known: set[Path] = set()

    def handle(self, line: bytes) -> None:
        """Handle one request. Returns when it is answered; a commit is only started."""
        request: Reply = {}
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError("not an object")
            request = found
            if request["op"] == "write":
                self._answer(request, self._write)
            elif request["op"] == "commit":
                self._commits = [t for t in self._commits if t.is_alive()]
                work = partial(self._commit, stop=self._stop)
                thread = threading.Thread(target=self._answer, args=(request, work), daemon=True)
                self._commits.append(thread)
                thread.start()
            elif request["op"] == "give_up":
                self._stop.set()
                self._stop = threading.Event()
            else:
                raise ValueError(f"op {request['op']!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            self._failed(request, f"not a request: {type(err).__name__}: {err}")

    def close(self) -> None:
        """Give waiting commits up."""
        self._stop.set()
        for thread in self._commits:
            thread.join(_ENDING)

    def _answer(self, request: Reply, work: Callable[[Reply], Reply]) -> None:
        started = time.monotonic()
        try:
            done = work(request)
        except DurableError as err:
            self._failed(request, str(err))
        except (ValueError, KeyError, TypeError) as err:
            self._failed(request, f"not a request: {type(err).__name__}: {err}")
        except MemoryError:
            self._failed(request, "no memory left for writing a checkpoint on this node")
        except Exception as err:  # noqa: BLE001 - whatever torch raises, the next step may work
            self._failed(request, f"{type(err).__name__}: {err}")
        else:
            done["seconds"] = round(time.monotonic() - started, 3)
            self._send(request, done)

    def _write(self, request: Reply) -> Reply:
        """Write a snapshot. Fields: source, directory, attempt and, if known, the digest."""
        from .dcp.write import write

        digest = request.get("digest")
        expected = None if digest is None else [count(crc) for crc in digest]
        done = write(text(request["source"]), self._base(request), _attempt(request), expected)
        return {"op": "written", **done._asdict()}

    def _commit(self, request: Reply, stop: threading.Event) -> Reply:
        """Commit a step. Fields: directory, step, world, attempt, wait (seconds), keep."""
        from .commit import CommitRequest, commit

        wait = float(request["wait"])
        if not 0 <= wait <= _MAX_WAIT:
            raise ValueError(f"wait {wait}")
        world = count(request["world"])
        if world < 1:
            raise ValueError("world 0")
        done = commit(
            CommitRequest(
                self._base(request), count(request["step"]), world, _attempt(request), wait,
                count(request["keep"]),
            ),
            stop,
        )  # fmt: skip
        return {"op": "committed", **done._asdict()}

    def _base(self, request: Reply) -> Path:
        """The directory of the durable tier, made when it is first used.

        It is not made again: if it is gone later, its file system is no longer mounted, and writing
        below the mount point would fill the node's own disk.
        """
        path = Path(text(request["directory"]))
        if not path.is_absolute():
            raise ValueError(f"directory {str(path)!r} is not absolute")
        if path not in self._known:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise DurableError(
                    explain(err, "making the directory for checkpoints", path)
                ) from None
            self._known.add(path)
        return path

    def _failed(self, request: Reply, why: str) -> None:
        op = request.get("op")
        self._send(
            request,
            {
                "op": "failed",
                "request": op if op in ("write", "commit") else "",
                "step": request.get("step"),
                "source": request.get("source"),
                "why": why,
            },
        )

    def _send(self, request: Reply, reply: Reply) -> None:
        if "id" in request:
            reply["id"] = request["id"]
        self._reply(reply)


def _attempt(request: Reply) -> str:
    if not is_attempt(request["attempt"]):
        raise ValueError(f"attempt {request['attempt']!r}: letters, digits, dots and dashes only")
    return str(request["attempt"])


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until ``requests`` ends or nobody reads ``replies``."""
    lock = threading.Lock()

    def reply(message: Reply) -> None:
        raw = json.dumps(message).encode() + b"\n"
        with lock:
            try:
                replies.write(raw)
                replies.flush()
            except (OSError, ValueError):
                pass  # whoever asked is gone; what was written is written

    writer = Writer(reply)
    gc.disable()  # imports make no garbage; with collections they take twice as long
    try:
        import torch

        from .commit import commit  # noqa: F401
        from .dcp.write import write  # noqa: F401
    except ImportError as err:
        reply({"op": "failed", "request": "", "why": f"torch cannot be imported: {err}"})
        return
    finally:
        gc.freeze()
        gc.enable()
    torch.set_num_threads(1)
    _lower_priority()
    while line := requests.readline(_MAX_LINE):
        writer.handle(line)
    writer.close()


def _lower_priority() -> None:
    try:
        os.nice(19)
    except OSError:
        pass


def main() -> NoReturn:
    """Serve, and end without taking torch's modules apart: that is half a second of a core."""
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Output of torch must not stand between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
