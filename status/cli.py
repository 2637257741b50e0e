"""``robust-status [JOBID|NODE] [--json]``: exit 0, 1 (Slurm, job or node not found), 2 (usage).

``robust-status --diagnose LOG…`` needs no cluster: exit 0 (cause found), 1 (not found), 2 (usage).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO

from robust_slurm.command_line import BAD_INPUT, NO
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run
from robust_slurm.config import Config, ConfigError, load
from robust_slurm.slurm import Client, Slurm, SlurmError
from robust_slurm.slurm.choose import connect
from robust_slurm.state_dir.files import log_of, read_incidents, read_state
from robust_slurm.state_dir.records import clean
from standby.pool.stock import read_pool
from status import suspicions
from status.model import JobReport, SlurmView, StatusReport, job_report, report
from status.suspicions import is_node

_DEADLINE_S = 8.0
JSON_VERSION = 1


def ask_slurm(slurm: Client, with_nodes: bool = True, with_places: bool = False) -> SlurmView:
    """One node call, one partition call and two job lists, side by side; where the jobs run, too.

    ``ping`` goes first because it answers at once when slurmctld is down; the others block 9 s.
    """
    if not slurm.ping():
        try:
            slurm.version()  # which needs no slurmctld, but Slurm's commands
        except SlurmError as error:
            if error.no_command:
                return SlurmView(error=clean(str(error)))
        return SlurmView(error="no slurmctld answers `scontrol ping`; is SLURM_CONF right?")
    try:
        with ThreadPoolExecutor(4) as pool:
            states = pool.submit(slurm.job_states)
            owners = pool.submit(slurm.job_owners)
            if not with_nodes:
                return SlurmView(job_states=states.result(), owners=owners.result())
            nodes = pool.submit(slurm.nodes)
            partitions = pool.submit(slurm.partitions)
            names = tuple(partitions.result())
            places = slurm.placements() if with_places else None
            return SlurmView(nodes.result(), names, states.result(), owners.result(), places)
    except SlurmError as error:
        return SlurmView(error=clean(str(error)))


def build_parser() -> Parser:
    parser = Parser(
        prog="robust-status",
        description="Show all nodes and robust-srun jobs: state, reports against nodes, ETTR.",
    )
    parser.add_argument(
        "subject",
        nargs="?",
        type=_subject,
        metavar="JOBID|NODE",
        help="show this job with its incidents (all digits), or what is suspected of this node",
    )
    parser.json_option()
    parser.add_argument(
        "--lemons",
        action="store_true",
        help="show the nodes that jobs excluded, and how many jobs went on without them",
    )
    parser.add_argument(
        "--format",
        choices=["exclude"],
        help="with --lemons: print only the nodes to exclude, as a list for sbatch --exclude",
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="show how often each rule of diagnosis reported a node, and was wrong",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="directory of the jobs' records (default: state_dir of robust.toml)",
    )
    parser.add_argument(
        "--diagnose",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="name the first cause of a failure in these logs of one job; needs no Slurm",
    )
    parser.add_argument(
        "--signatures",
        type=Path,
        metavar="FILE",
        help="with --diagnose: signatures of the site, tried before the built-in ones "
        "(default: signatures_file of robust.toml)",
    )
    # srun's users try it: named, so that the answer is one line.
    parser.add_argument("-M", "--clusters", metavar="NAMES", help=argparse.SUPPRESS)
    return parser


def _subject(text: str) -> int | str:
    """A job id, or the name of a node."""
    if not (text.isascii() and text.isdigit()):
        if not is_node(text):
            raise argparse.ArgumentTypeError(f"not a job id or the name of a node: {text!r}")
        return text
    if len(text) > 10 or not 0 < int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f"not a job id: {text[:40]!r}")
    return int(text)


def _contradiction(args: argparse.Namespace) -> str:
    """Why these options do not go together; "" if they do."""
    given = {
        "JOBID|NODE": args.subject is not None,
        "--lemons": args.lemons,
        "--rules": args.rules,
        "--diagnose": bool(args.diagnose),
    }
    if args.clusters is not None:
        return f"-M: shows the cluster of this host only; run it on a host of {args.clusters}"
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        return f"{' and '.join(named)} do not go together; use one of them"
    if args.format and not args.lemons:
        return "--format needs --lemons"
    return "--format and --json do not go together" if args.format and args.json else ""


def main(
    argv: Sequence[str] | None = None, slurm: Slurm | None = None, out: IO[str] | None = None
) -> int:
    """Print the report to ``out`` (stdout) and return the exit code."""

    def show(args: argparse.Namespace, target: IO[str]) -> int:
        if wrong := _contradiction(args):
            raise CommandError(wrong, BAD_INPUT)
        named = {"robust-state-dir": args.state_dir} if args.state_dir else {}
        config = load(cli=named, warn=partial(warn, "robust-status"))
        return _show(args, config, slurm, target)

    return run(build_parser(), argv, show, out, codes={ConfigError: BAD_INPUT, SlurmError: NO})


def _show(args: argparse.Namespace, config: Config, slurm: Slurm | None, out: IO[str]) -> int:
    if args.diagnose:
        named = config.signatures_file
        site = args.signatures or (Path(named).expanduser() if named else None)
        return _diagnose(args.diagnose, site, args.json, out)
    door = slurm if slurm is not None else connect(config.slurm_backend, _DEADLINE_S)
    try:
        return _answer(args, config, door, out)
    finally:
        door.close()


def _answer(args: argparse.Namespace, config: Config, door: Slurm, out: IO[str]) -> int:
    if isinstance(args.subject, int):
        return _show_job(args.subject, config.state_dir, door, args.json, out)
    if args.subject is not None:
        view = ask_slurm(door)
        return suspicions.show_node(args.subject, config.state_dir, view, args.json, out)
    if args.lemons:
        as_list = args.format == "exclude"
        return suspicions.show_lemons(config.state_dir, ask_slurm(door), args.json, as_list, out)
    if args.rules:
        return suspicions.show_rules(config.state_dir, ask_slurm(door), args.json, out)
    return _show_all(config, door, args.json, out)


def _diagnose(paths: Sequence[Path], site: Path | None, as_json: bool, out: IO[str]) -> int:
    from srun_wrapper.signatures.catalogue import CatalogueError, load
    from status import diagnose

    try:
        catalogue = load(site)
        logs = diagnose.read_logs(paths)
    except (CatalogueError, OSError) as error:
        raise CommandError(str(error), BAD_INPUT) from None
    verdict, lines = diagnose.diagnose(logs, catalogue)
    text = json.dumps(diagnose.as_json(logs, verdict), indent=1) if as_json else "\n".join(lines)
    print(text, file=out)
    return 1 if verdict.layer == "unknown" else 0


def _show_all(config: Config, door: Slurm, as_json: bool, out: IO[str]) -> int:
    pool, wrong = read_pool(config.state_dir)
    view = ask_slurm(door, with_places=pool is not None)
    files = read_state(config.state_dir, view.owners)
    if wrong:
        files.problems.append(wrong)
    done = report(
        files.rosters,
        files.accusations,
        files.problems,
        view,
        config.standby_partition,
        time.time(),
        pool,
    )
    if as_json:
        _print_json(done, out)
    else:
        from status.render import console, print_report

        print_report(done, console(out))
    return 1 if view.error else 0


def _show_job(job_id: int, state_dir: Path, door: Slurm, as_json: bool, out: IO[str]) -> int:
    view = ask_slurm(door, with_nodes=False)
    files = read_state(state_dir, view.owners, job_id)
    incidents, problems = read_incidents(files.directory)
    if not files.rosters and not incidents:
        for problem in (*files.problems, *problems):
            warn("robust-status", problem)
        raise CommandError(
            f"no record of job {job_id} under {state_dir / 'jobs'}; was it started by "
            "robust-srun, with this state_dir?"
        )
    done = job_report(
        job_id,
        files.rosters,
        incidents,
        [*files.problems, *problems],
        view,
        time.time(),
        log_of(files.directory),
    )
    if as_json:
        _print_json(done, out)
    else:
        from status.render import console, print_job

        print_job(done, console(out))
    return 1 if view.error else 0


def _print_json(done: StatusReport | JobReport, out: IO[str]) -> None:
    json.dump({"version": JSON_VERSION, **asdict(done)}, out, indent=1, allow_nan=False)
    out.write("\n")


if __name__ == "__main__":
    sys.exit(main())
