"""A program of steps that is an MPI program to Slurm: it speaks PMI2 on the descriptor PMI_FD.

MPI_Init is ``fullinit`` with an exchange of keys, each step has a fence of all ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

import robust_slurm

parser = argparse.ArgumentParser()
parser.add_argument("dir", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--hold", type=int, default=0, help="stay after this step, in one run only")
args = parser.parse_args()
line = socket.socket(fileno=int(os.environ["PMI_FD"]))
rank = os.environ["PMI_RANK"]


def receive(count: int) -> str:
    data = line.recv(count, socket.MSG_WAITALL)
    assert len(data) == count, f"slurmstepd has closed PMI_FD: {data!r}"
    return data.decode()


def ask(text: str) -> dict[str, str]:
    """Send a command of PMI2, and return the fields of the answer."""
    line.sendall(f"{len(text):6}{text}".encode())
    answer = receive(int(receive(6)))
    fields = dict(each.split("=", 1) for each in answer.split(";") if "=" in each)
    assert fields.get("rc", "0") == "0", answer
    return fields


line.sendall(b"cmd=init pmi_version=2 pmi_subversion=0\n")
first = b""
while not first.endswith(b"\n"):
    first += line.recv(1)
assert b"rc=0" in first, first
world = ask(f"cmd=fullinit;pmijobid={os.environ['PMI_JOBID']};pmirank={rank};threaded=FALSE;")
ask(f"cmd=kvs-put;key=card-{rank};value=node-{os.environ['SLURMD_NODENAME']};")
ask("cmd=kvs-fence;")
for other in range(int(world["size"])):
    card = ask(f"cmd=kvs-get;jobid={os.environ['PMI_JOBID']};srcid=-1;key=card-{other};")
    assert card["value"].startswith("node-"), card
for step in range(1, args.steps + 1):
    time.sleep(0.03)
    ask("cmd=kvs-fence;")
    robust_slurm.beat(step)
    if rank == "0":
        stay = step == args.hold and not (args.dir / "held").exists()
        if stay:
            (args.dir / "held").touch()
        print(f"step {step} of a world of {world['size']}", flush=True)
        if stay:
            time.sleep(3600)
ask("cmd=finalize;")
