"""Stands in for the writer process: writes a copy, or fails as the ``directory`` says."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from robust_slurm.checkpoint.format.layout import read_snapshot


def _later(go: Path, given_up: threading.Event, reply: dict[str, Any]) -> None:
    while not go.exists() and not given_up.is_set():
        time.sleep(0.01)
    _say(reply if go.exists() else {"id": reply["id"], "op": "failed", "why": "given up"})


def _say(reply: dict[str, Any]) -> None:
    os.write(1, json.dumps(reply).encode() + b"\n")  # whole, whichever thread it is


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the real one
    given_up = threading.Event()
    print(json.dumps({"op": "ready", "pid": os.getpid()}), flush=True)
    print("a library greets", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "give_up":
            given_up.set()
            given_up = threading.Event()
            continue
        directory = Path(request["directory"])
        mode = directory.name
        with (directory.parent / "requests").open("a") as log:
            log.write(json.dumps({**request, "pid": os.getpid()}) + "\n")
        first = sum(1 for _ in (directory.parent / "requests").open()) == 1
        reply = {"id": request["id"]}
        if mode == "dies" or (mode == "dies-once" and first):
            sys.stderr.write("Traceback: out of luck\n")
            sys.stderr.flush()
            os._exit(1)
        if mode == "hangs":
            time.sleep(1000)
        if mode == "fails":
            reply |= {"op": "failed", "why": "read-only file system"}
        elif request["op"] == "commit":
            reply |= {"op": "committed", "step": request["step"]}
            if mode == "commit-notes":
                reply["notes"] = ["another run (76) commits as well"]
            if mode == "commit-fails" and not (directory.parent / "go").exists():
                reply |= {"op": "failed", "why": "no part of rank 1"}
            if mode == "commit-waits":  # for the other ranks' parts, beside other requests
                waiting = (directory.parent / "go", given_up, reply)
                threading.Thread(target=_later, args=waiting).start()
                continue
        else:
            while mode == "waits" and not (directory.parent / "go").exists():
                time.sleep(0.01)
            snapshot, plan = read_snapshot(request["source"])
            directory.mkdir(exist_ok=True)
            name = f"{request['attempt']}-{snapshot.rank}-{snapshot.step}"
            (directory / name).write_bytes(Path(request["source"]).read_bytes())
            reply |= {"op": "written", "bytes": plan.size}
        _say(reply)


if __name__ == "__main__":
    main()
