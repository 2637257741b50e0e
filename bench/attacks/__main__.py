"""Run bench.attacks: ``python -m bench.attacks [--list] [--case NAME]… [--json FILE]``."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.attacks.apart import apart
from bench.attacks.attack import LAB, Attack, Got
from bench.attacks.cases import ATTACKS
from bench.attacks.room import Room
from bench.common import BenchError, Results, finish, parser, results_for
from lab import Cluster, Lab, LabError

TOP = Path("/var/lib/robust-lab")
"""Below a directory that only root can write, as a site's own files are."""


@contextlib.contextmanager
def _lab(wanted: bool) -> Iterator[Lab | None]:
    """Bring up the lab that attacks share, if one needs it."""
    if not wanted:
        yield None
        return
    with Cluster(nodes=3, standby=1) as made:
        yield made


def attempt(attack: Attack, lab: Lab | None) -> Got | str:
    """Run an attack; return what it got, or why that proves nothing."""
    TOP.mkdir(parents=True, exist_ok=True)
    room = Room(Path(tempfile.mkdtemp(prefix="attack-", dir=TOP)), lab)
    room.top.chmod(0o755)
    try:
        if attack.where == LAB:  # from a PID namespace of its own, nothing enters the lab's nodes
            return attack.run(room)
        return apart(attack.run, room, attack.seconds)
    except (BenchError, LabError, OSError) as error:
        return str(error)
    finally:
        # shutil.rmtree gives up below a thousand directories.
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(room.top)], check=False)


def record(results: Results, found: Sequence[tuple[Attack, Got | str]]) -> None:
    """Add the counts, and what each attack got that got something."""
    got = [(attack, one) for attack, one in found if isinstance(one, Got)]
    results.count("attacks.tried", len(got))
    results.count("attacks.succeeded", sum(one.succeeded for _, one in got))
    results.count("attacks.healthy_nodes_drained", sum(len(one.drained) for _, one in got))
    results.count("attacks.fail_open_silent", sum(one.silent for _, one in got))
    results.count("attacks.void", len(found) - len(got))
    for attack, one in found:
        if isinstance(one, str):
            results.settings[f"void: {attack.name}"] = one
        elif _wrong(one):
            results.settings[f"succeeded: {attack.name}"] = one.what


def _wrong(one: Got | str) -> bool:
    return isinstance(one, str) or one.succeeded or one.silent or bool(one.drained)


def table(found: Sequence[tuple[Attack, Got | str]]) -> Table:
    """Return what each tried, and what it got."""
    made = Table(title="bench.attacks")
    for title in ("attack", "row", "tries", "succeeded", "got"):
        made.add_column(title, no_wrap=title == "attack")
    for attack, one in found:
        worked = "void" if isinstance(one, str) else "YES" if _wrong(one) else "no"
        what = one if isinstance(one, str) else one.what
        made.add_row(attack.name, attack.row, attack.tries, worked, what)
    return made


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    made = parser("attacks", ATTACKS)
    made.add_argument("--list", action="store_true", help="print the attacks and end")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 if an attack succeeded or proves nothing."""
    args = arguments(argv)
    if args.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:28} {attack.row:18} {attack.tries}")
        return 0
    if os.geteuid():
        print("bench.attacks: run it as root: it plays the root plane", file=sys.stderr)
        return 2
    results = results_for("attacks", args)
    chosen = [ATTACKS[name] for name in args.case or ATTACKS]
    found: list[tuple[Attack, Got | str]] = []
    with _lab(any(attack.where == LAB for attack in chosen)) as lab:
        for attack in chosen:
            one = attempt(attack, lab)
            found.append((attack, one))
            line = one if isinstance(one, str) else one.what
            print(
                f"{time.strftime('%H:%M:%S')} {attack.name}: "
                f"{'SUCCEEDED OR VOID: ' if _wrong(one) else ''}{line}",
                file=sys.stderr,
                flush=True,
            )
            record(results, found)
    Console(width=180).print(table(found))
    return finish(results, args) or int(any(_wrong(one) for _, one in found))


if __name__ == "__main__":
    raise SystemExit(main())
