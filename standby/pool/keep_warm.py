"""Pre-reads files on the idle nodes of the pool, by one small job on each."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from robust_slurm.slurm import SlurmError, classify, run_command
from robust_slurm.slurm.run import without_slurm
from standby.pool import preread
from standby.pool.members import Sight, Use, Wish, uses
from status.records import clean

_AT_ONCE = 16
_START_S = 10  # for Slurm to start the job at once, or not at all
_END_S = 30.0  # beyond its time
_MOST_TEXT = 300  # characters of an error: it names a file, whose name anybody may have chosen


def idle(wish: Wish, sight: Sight) -> list[str]:
    """The standbys on which nothing runs. Pure."""
    use = uses(wish, sight.jobs)
    return [
        name
        for name in sight.nodes_of(wish.partition)
        if name in sight.nodes and sight.nodes[name].idle and use.get(name, Use()) == Use()
    ]


def argv(
    partition: str, node: str, python: str, paths: Sequence[str], most: int, seconds: float
) -> list[str]:
    """srun's words for one node: it starts at once or not at all, and is over by its limit."""
    minutes = math.ceil((seconds + _END_S) / 60)
    return [
        *("srun", "--quiet", f"--partition={partition}", "--nodes=1", "--ntasks=1"),
        *(f"--nodelist={node}", f"--immediate={_START_S}", f"--time={minutes}"),
        *("--job-name=robust-warm", "--chdir=/", "--export=NONE", "--"),
        *(python, "-IS", preread.__file__, str(most), str(seconds), *paths),
    ]


def run(
    wish: Wish,
    sight: Sight,
    python: str,
    paths: Sequence[str],
    most: int,
    seconds: float,
    makes_way: bool,
    out: IO[str],
) -> int:
    """Read them everywhere; a line for each node. Exit code 1 if a node could not read them.

    ``makes_way``: jobs of the low-priority partition do, with this slurm.conf.
    """
    nodes = idle(wish, sight)
    if not nodes:
        out.write(f"no node of {wish.partition} is idle\n")
        return 1
    low = wish.backfill if makes_way and wish.backfill in sight.partitions else ""
    if not low:
        out.write(
            f"note: without a partition whose jobs make way (apply --backfill) a companion waits "
            f"for these jobs, {seconds:g} s at most\n"
        )

    def one(node: str) -> tuple[str, bool]:
        words = argv(low or wish.partition, node, python, paths, most, seconds)
        return _read(words, _START_S + seconds + _END_S)

    good = True
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for node, (said, well) in zip(nodes, pool.map(one, nodes), strict=True):
            out.write(f"{node}  {said}\n")
            good = good and well
    return 0 if good else 1


def _read(words: Sequence[str], deadline_s: float) -> tuple[str, bool]:
    """Read files on one node; return the outcome as text, and whether it was good."""
    try:
        done = run_command(words, deadline_s, None, without_slurm(os.environ), None)
    except SlurmError as error:
        return clean(str(error), _MOST_TEXT), False
    failed = classify(words, done.returncode, done.stdout, done.stderr)
    if failed is not None:
        return f"not read: {failed.message}", False
    return told(done.stdout)


def told(answer: str) -> tuple[str, bool]:
    """standby.pool.preread's answer for people. Pure."""
    try:
        found = json.loads(answer)
        text = f"read {found['files']:d} files, {found['bytes'] / 1e9:.2f} GB in "
        text += f"{found['seconds']:.1f} s"
        errors = [clean(str(error), _MOST_TEXT) for error in found["errors"]]
        whole = bool(found["all"])
    except (ValueError, LookupError, TypeError, OverflowError):
        return f"no answer: {answer[:200]!r}", False
    if errors:
        return f"{text}; {'; '.join(errors)}", False
    return text if whole else f"{text}; there is more (--seconds, --gib)", True
