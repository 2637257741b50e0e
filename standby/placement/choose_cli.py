"""``robust-standby choose``: which standby takes a lost node's place, and why.

Exit 0; 2 for input that cannot be used, or fewer candidates than lost nodes (what there is, is
still printed).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO

from robust_slurm.checkpoint.planning.topology import MAX_NODES, at_most
from robust_slurm.slurm.values import ParseError, expand
from standby.placement.choose import UNKNOWN, Choice, decide
from standby.placement.spread import ALPHA, fits, parse_mesh
from standby.placement.topology import minipods

JSON_VERSION = 1
_LARGEST_FILE = 64 * 2**20  # bytes of a topology file


class BadInput(Exception):
    """Input that cannot be used; the text says why and what to do."""


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Print to ``out`` (stdout) and return the exit code."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the usage, or the help
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _choose(args, sys.stdout if out is None else out)
    except BadInput as error:
        print(f"robust-standby choose: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="robust-standby choose",
        description="choose the standby nodes that spread the job's groups least",
    )
    parser.add_argument(
        "--nodes", required=True, metavar="LIST", help="the job's nodes in rank order"
    )
    parser.add_argument("--lost", required=True, metavar="LIST", help="those of them to replace")
    parser.add_argument("--candidates", required=True, metavar="LIST", help="idle standby nodes")
    parser.add_argument(
        "--mesh", required=True, metavar="pp=P,dp=D,tp=T",
        help="sizes of the parallel dimensions as in the DeviceMesh: the last varies fastest",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="default: as many as make the mesh"
    )
    parser.add_argument(
        "--topology", type=Path, metavar="FILE",
        help="topology.conf, or what `scontrol show topology` printed (default: ask Slurm)",
    )  # fmt: skip
    parser.add_argument(
        "--level", type=int, metavar="N",
        help="which switches are minipods: 0 leaves, 1 those above (default: the highest level "
        "that has more than one)",
    )  # fmt: skip
    parser.add_argument(
        "--alpha", type=float, default=ALPHA, metavar="A",
        help=f"weight of data-parallel groups, 0 to 1; pipelines weigh 1 - A (default: {ALPHA})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _choose(args: argparse.Namespace, out: IO[str]) -> int:
    places = _nodes("--nodes", args.nodes)
    lost = _nodes("--lost", args.lost)
    candidates = _nodes("--candidates", args.candidates)
    mesh = _mesh(args.mesh)
    ranks = _ranks(mesh, args.ranks_per_node, len(places))
    switches = _switches(args.topology, args.level)
    try:
        found = decide(lost, candidates, places, mesh, ranks, switches, args.alpha)
        # What each minipod would cost if all came from it: the reason, for one lost node.
        ways = [
            (pod, decide(lost, names, places, mesh, ranks, switches, args.alpha))
            for pod, names in sorted(_by_minipod(candidates, places, switches).items())
        ]
    except ValueError as error:
        raise BadInput(str(error)) from error
    ways = [(pod, way) for pod, way in ways if len(way.takes) == len(found.takes)]
    say = _say_json if args.json else _say
    say(found, ways, lost, switches, args.alpha, out)
    missing = len(set(lost)) - len(found.takes)
    if missing:
        raise BadInput(f"{missing} of {len(set(lost))} lost nodes get none: too few candidates")
    return 0


def _say(
    found: Choice,
    ways: Sequence[tuple[str, Choice]],
    lost: Sequence[str],
    switches: Mapping[str, str],
    alpha: float,
    out: IO[str],
) -> None:
    for node, taker in found.takes.items():
        print(f"{node} ({_pod(switches, node)}) <- {taker} ({_pod(switches, taker)})", file=out)
    for name, then, now in (
        ("DP", found.before.dp, found.after.dp),
        ("PP", found.before.pp, found.after.pp),
        ("weighted", found.before.weighted(alpha), found.after.weighted(alpha)),
    ):
        print(f"{name} spread: {then:g} -> {now:g}", file=out)
    if not switches:
        print("no topology: all nodes count alike, the first by name are taken", file=out)
    elif not found.exact:
        print(f"not proven to be the best; the best is at least {found.bound:g}", file=out)
    for pod, way in ways:
        cost = way.after
        print(
            f"all from {pod}: DP {cost.dp}, PP {cost.pp}, weighted {cost.weighted(alpha):g}, "
            f"total {cost.total}",
            file=out,
        )


def _say_json(
    found: Choice,
    ways: Sequence[tuple[str, Choice]],
    lost: Sequence[str],
    switches: Mapping[str, str],
    alpha: float,
    out: IO[str],
) -> None:
    def of(choice: Choice, when: str) -> dict[str, float]:
        spread = choice.before if when == "before" else choice.after
        return {**spread._asdict(), "weighted": spread.weighted(alpha)}

    answer = {
        "version": JSON_VERSION,
        "alpha": alpha,
        "takes": found.takes,
        "unfilled": [node for node in dict.fromkeys(lost) if node not in found.takes],
        "minipods": {n: _pod(switches, n) for pair in found.takes.items() for n in pair},
        "before": of(found, "before"),
        "after": of(found, "after"),
        "bound": found.bound,
        "exact": found.exact,
        "topology": bool(switches),
        "all_from": {pod: of(way, "after") for pod, way in ways},
    }
    print(json.dumps(answer, indent=2), file=out)


def _pod(switches: Mapping[str, str], node: str) -> str:
    return switches.get(node, UNKNOWN)


def _by_minipod(
    candidates: Sequence[str], places: Sequence[str], switches: Mapping[str, str]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in candidates:
        if name not in places:
            found.setdefault(_pod(switches, name), []).append(name)
    return found


def _nodes(option: str, text: str) -> list[str]:
    try:
        if at_most(text) > MAX_NODES:
            raise BadInput(f"{option}: more than {MAX_NODES} nodes")
        found = list(expand(text))
    except (ParseError, ValueError, IndexError) as error:
        raise BadInput(f"{option} {text}: not a node list ({error})") from error
    if not found:
        raise BadInput(f"{option}: names no node")
    return found


def _mesh(text: str) -> dict[str, int]:
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise BadInput(f"--mesh {error}") from None


def _ranks(mesh: Mapping[str, int], named: int | None, places: int) -> int:
    world = prod(mesh.values())
    if named is None:
        if world % places:
            raise BadInput(
                f"{world} ranks of the mesh do not divide among {places} nodes: correct --mesh "
                "or --nodes"
            )
        return world // places
    if not fits(mesh, named * places):
        raise BadInput(
            f"the mesh has {world} ranks, {places} nodes of {named} have {named * places}: "
            "correct --mesh, --nodes or --ranks-per-node"
        )
    return named


def _switches(file: Path | None, level: int | None) -> dict[str, str]:
    try:
        found = minipods(_text(file), level)
    except ValueError as error:
        raise BadInput(f"--{error}") from error
    if file is not None and not found:
        raise BadInput(
            f"{file}: no switches with nodes in it; give topology.conf or the output of "
            "`scontrol show topology`"
        )
    return found


def _text(file: Path | None) -> str:
    if file is None:
        from robust_slurm.slurm import Slurm, SlurmError

        try:
            return Slurm().topology()
        except SlurmError as error:
            raise BadInput(f"Slurm does not tell the topology ({error}): give --topology") from None
    try:
        with file.open("rb") as handle:
            data = handle.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST_FILE:
        raise BadInput(f"{file} is larger than {_LARGEST_FILE} bytes: not a topology")
    return data.decode("utf-8", errors="replace")


if __name__ == "__main__":
    raise SystemExit(main())
