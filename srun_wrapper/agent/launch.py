"""The data of a rank's start: the shim's options, the launch of one rank, and its process."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robust_slurm.auto.snapshot_paths import TREE
from srun_wrapper.agent.streams.pump import Pump
from srun_wrapper.agent.warm.preforked import Forked
from srun_wrapper.protocol.messages import RankStart, Start
from srun_wrapper.protocol.task_options import OutputPlan


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """Options on command and output that robust-srun passes to the shim in its argv."""

    command: tuple[str, ...]
    output: OutputPlan
    auto: bool = True
    regex: str = ""
    inherit: bool = False  # --pty: the rank gets the terminal itself
    warm: bool = True
    warm_packages: tuple[str, ...] = ()
    work_limit: float = 60.0  # s over the grace for a rank that writes in its handler of SIGTERM


@dataclass(slots=True)
class Running:
    """A rank's process."""

    epoch: int
    process: subprocess.Popen[bytes] | Forked
    pumps: list[Pump] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Everything needed to run a rank, and the receiver of its end."""

    order: Start
    rank: RankStart
    command: list[str]
    env: dict[str, str]
    record: Path
    directory: str = ""  # working directory; "": the shim's own


def check_snapshot(env: Mapping[str, str]) -> None:
    """Raise FileNotFoundError if the code that the rank is to run is not on this node.

    A rank would say only that it cannot open a file, which looks like the program's own error.
    """
    tree = env.get(TREE, "")
    if tree and not Path(tree).is_dir():
        why = "the snapshot of the code is not on this node; is code_store (or state_dir) mounted?"
        raise FileNotFoundError(errno.ENOENT, why, tree)
