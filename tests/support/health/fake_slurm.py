"""A scontrol for tests of what the gate tells Slurm: a program that keeps nodes in a file."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -IS
import fcntl, json, sys, time
path = {state!r}
words = sys.argv[1:]
lock = open(path + ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
state = json.load(open(path))
state["calls"].append(words)
every = words[-1] == "node"
state["looks"] -= every
json.dump(state, open(path, "w"))
if state["dead"] or (every and state["looks"] < 0):
    time.sleep(state["dead"])
    sys.exit("slurm_load_node error: Unable to contact slurm controller (connect failure)")
nodes = state["nodes"]
if "show" in words:
    wanted = words[words.index("node") + 1:]
    for name in wanted or nodes:
        if name not in nodes:
            print("Node %s not found" % name)
            sys.exit(1)
        node = nodes[name]
        reason = " Reason=%s [root@%d]" % (node["reason"], node["time"]) if node["reason"] else ""
        print("NodeName=%s State=%s Partitions=train%s" % (name, node["state"], reason))
else:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    node = nodes[given["NodeName"]]
    flags = [f for f in node["state"].split("+") if f != "DRAIN"]
    if given["State"] == "DRAIN":
        node.update(state="+".join([*flags, "DRAIN"]), reason=given["Reason"], time=time.time())
    else:
        node.update(state="+".join(flags), reason="", time=0)
    json.dump(state, open(path, "w"))
"""


class FakeSlurm:
    """``bin`` is for [gate] slurm_bin."""

    def __init__(self, directory: Path, *nodes: str) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        self._path = directory / "slurm.json"
        text = _PROGRAM.format(python=sys.executable, state=str(self._path))
        program = self.bin / "scontrol"
        program.write_text(text)
        program.chmod(0o755)
        empty = {"state": "IDLE", "reason": "", "time": 0}
        table = {name: dict(empty) for name in nodes}
        self._write({"dead": 0, "looks": 1 << 30, "calls": [], "nodes": table})

    def _read(self) -> Any:
        return json.loads(self._path.read_text())

    def _write(self, state: Any) -> None:
        with Path(f"{self._path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._path.write_text(json.dumps(state))

    def node(self, name: str = "n1") -> Any:
        return self._read()["nodes"][name]

    def set(self, name: str = "n1", **values: Any) -> None:
        state = self._read()
        state["nodes"][name] |= {"time": time.time(), **values}
        self._write(state)

    def die(self, seconds: float = 0.01) -> None:
        """Answer like commands without a slurmctld from now on, after so many seconds."""
        self._write(self._read() | {"dead": seconds})

    def answer_looks(self, count: int) -> None:
        """Answer so many questions for all nodes from now on, and all other ones."""
        self._write(self._read() | {"looks": count})

    def live(self) -> None:
        self._write(self._read() | {"dead": 0})

    @property
    def calls(self) -> list[list[str]]:
        found: list[list[str]] = self._read()["calls"]
        return found

    @property
    def orders(self) -> list[list[str]]:
        return [call for call in self.calls if "update" in call]

    @property
    def drained(self) -> list[str]:
        return [name for name, node in self._read()["nodes"].items() if "DRAIN" in node["state"]]
