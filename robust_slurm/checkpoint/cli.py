"""``robust-ckpt ls|verify|export``: exit 0 (good), 1 (something bad was found), 2 (usage)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from robust_slurm.command_line import BAD_INPUT
from robust_slurm.command_line.errors import CommandError
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.progress import ProgressBar
from robust_slurm.command_line.run import run
from robust_slurm.text import counted

from . import listing
from .durable import tier
from .durable.files import DurableError

JSON_VERSION = 1
_DIRECTORY = "ROBUST_CHECKPOINT_DIR"
_SUFFIXES = (".safetensors", ".pt")


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Print to ``out`` (stdout) and return the exit code."""
    return run(build_parser(), argv, _command, out, codes={listing.ListingError: BAD_INPUT})


def _command(args: argparse.Namespace, out: IO[str]) -> int:
    try:
        if args.command == "ls":
            return _ls(_directory(args.directory), args.json, out)
        if args.command == "verify":
            return _verify(args.path.resolve(), args.json, out)
        return _export(args.directory.resolve(), args.out, args.only, args.json, out)
    except (OSError, RuntimeError) as err:  # a directory on the way is locked, links in a circle
        raise CommandError(f"cannot be read: {err}", BAD_INPUT) from None


def build_parser() -> Parser:
    parser = Parser(prog="robust-ckpt", description="List, verify and export checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ls = commands.add_parser("ls", help="list steps, or a node's snapshot files")
    ls.add_argument(
        "directory", nargs="?", type=Path, metavar="DIR",
        help=f"a checkpoint directory, or one of snapshot files (default: ${_DIRECTORY})",
    )  # fmt: skip
    check = commands.add_parser("verify", help="read everything and compare it with its digests")
    check.add_argument("path", type=Path, metavar="PATH", help="a directory, a step, or a file")
    export = commands.add_parser("export", help="write one file of whole tensors (needs torch)")
    export.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="a checkpoint directory, whose newest step is exported, or the directory of one step",
    )
    export.add_argument("out", type=Path, metavar="OUT", help="a new .safetensors or .pt file")
    export.add_argument(
        "--only", default="", metavar="NAME",
        help="export only the entries under NAME, with NAME removed from their names: --only model",
    )  # fmt: skip
    for each in (ls, check, export):
        each.json_option()
    return parser


def _directory(named: Path | None) -> Path:
    """The directory to list. A link that the user names is followed; no other is."""
    if named is not None:
        return named.resolve()
    usual = os.environ.get(_DIRECTORY)
    if not usual:
        raise listing.ListingError(f"name a directory, or set {_DIRECTORY}")
    return Path(usual).resolve()


def _ls(directory: Path, as_json: bool, out: IO[str]) -> int:
    found = listing.read_listing(directory)
    if as_json:
        _print_json(
            out,
            directory=found.directory,
            steps=[row._asdict() for row in found.steps],
            files=[row._asdict() for row in found.files],
        )
    else:
        from robust_slurm.command_line.screen import console

        from .listing_render import print_listing

        print_listing(found, console(out))
    return 1 if found.bad else 0


def _verify(path: Path, as_json: bool, out: IO[str]) -> int:
    with ProgressBar("verifying", listing.size(path), "B") as progress:
        results = listing.check(path, progress.add)
    if not results:
        raise CommandError(
            f"there is no complete checkpoint in {path}; `robust-ckpt ls {path}` shows more"
        )
    if as_json:
        checked = [
            {**each._asdict(), "problems": [p._asdict() for p in each.problems]} for each in results
        ]
        _print_json(out, checked=checked)
    else:
        from robust_slurm.command_line.screen import console

        from .listing_render import print_checked

        print_checked(results, console(out))
    return 0 if all(each.good for each in results) else 1


def _export(directory: Path, target: Path, only: str, as_json: bool, out: IO[str]) -> int:
    if not directory.is_dir():
        raise listing.ListingError(f"{directory} is not a directory")
    if target.suffix not in _SUFFIXES:
        raise listing.ListingError(f"{target}: the name must end in {' or '.join(_SUFFIXES)}")
    if target.exists() or target.is_symlink():
        raise listing.ListingError(f"{target} is there already; name a new file")
    if not target.parent.is_dir():
        raise listing.ListingError(f"{target.parent} is not a directory")
    step_dir = _step_dir(directory)
    try:
        from .durable.export import export
    except ImportError as err:
        raise listing.ListingError(
            f"export needs torch, and this Python cannot import it ({err}). Run it in the "
            "environment that trains: python -m robust_slurm.checkpoint.cli export ..."
        ) from None
    try:
        # Each byte is verified, then copied.
        with ProgressBar("exporting", 2 * listing.size(step_dir), "B") as progress:
            done = export(step_dir, target, only, progress.add)
    except DurableError as err:
        raise CommandError(str(err)) from None
    if as_json:
        _print_json(out, path=str(target), source=str(step_dir), **done._asdict())
    else:
        kept = f" and {counted(done.values, 'value')}" if done.values else ""
        sizes = f"{counted(done.tensors, 'tensor')}{kept}, {counted(done.bytes, 'byte')}"
        print(f"{target}: {step_dir.name}, {sizes}", file=out)
        if done.left_out:
            more = f" and {len(done.left_out) - 3} more" if len(done.left_out) > 3 else ""
            names = ", ".join(done.left_out[:3]) + more
            print(f"left out, as torch.load refuses their types: {names}", file=out)
    return 0


def _step_dir(directory: Path) -> Path:
    """Return the directory itself if it is one step's, else that of the newest step in it; of a
    doubted one only if there is no other. Raises ListingError, CommandError."""
    if tier.step_of(directory) is not None or tier.is_committed(directory):
        return directory
    try:
        found = tier.committed(directory)
    except DurableError as err:
        raise CommandError(str(err)) from None
    if not found:
        raise listing.ListingError(
            f"{directory} is no step's directory and has no complete step in it; "
            f"`robust-ckpt ls {directory}` shows more"
        )
    return max(found, key=lambda each: (not each.mark.doubt, each.step)).path


def _print_json(out: IO[str], **content: Any) -> None:
    json.dump({"version": JSON_VERSION, **content}, out, indent=1, allow_nan=False)
    out.write("\n")


if __name__ == "__main__":
    sys.exit(main())
