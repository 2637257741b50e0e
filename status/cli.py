"""``robust-status [JOB|NODE]``: exit 0, 1 (Slurm, records, job or node not found), 2 (usage).

``robust-status --diagnose LOG…`` needs no cluster: exit 0 (cause found), 1 (not found), 2 (usage).
``robust-status serve``: a web page and metrics (``status/web/``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

from robust_slurm.command_line import BAD_INPUT, NO
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.run import run
from robust_slurm.config import Config, ConfigError, load
from robust_slurm.slurm import Slurm, SlurmError
from status import show, suspicions
from status.options import build_parser, contradiction
from status.source import RecordSource, ask_slurm, demo, real


def main(
    argv: Sequence[str] | None = None, slurm: Slurm | None = None, out: IO[str] | None = None
) -> int:
    """Print the report to ``out`` (stdout) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        from status.web.serve import main as serve

        return serve(words[1:])

    def answer(args: argparse.Namespace, target: IO[str]) -> int:
        if wrong := contradiction(args):
            raise CommandError(wrong, BAD_INPUT)
        named = {"robust-state-dir": args.state_dir} if args.state_dir else {}
        config = load(cli=named, warn=partial(warn, "robust-status"))
        return _show(args, config, slurm, target)

    return run(build_parser(), words, answer, out, codes={ConfigError: BAD_INPUT, SlurmError: NO})


def _show(args: argparse.Namespace, config: Config, slurm: Slurm | None, out: IO[str]) -> int:
    if args.diagnose:
        named = config.signatures_file
        site = args.signatures or (Path(named).expanduser() if named else None)
        return _diagnose(args.diagnose, site, args.json, out)
    with demo() if args.demo else real(config, slurm) as source:
        if args.watch is None:
            return _answer(args, source, out)
        from status.views.watch import watch

        return watch(lambda to: _answer(args, source, to), args.watch, out)


def _answer(args: argparse.Namespace, source: RecordSource, out: IO[str]) -> int:
    where, as_json = source.state_dir, args.json
    if args.accounts:
        from status.show_accounts import show_accounts

        return show_accounts(args, source, out)
    if args.metrics is not None:
        from status.metrics.textfile import write_metrics

        return write_metrics(args.metrics, source, out, as_json)
    if args.html is not None:
        from status.report.write import write_report

        return write_report(args.subject, args.html, source, out, as_json)
    if isinstance(args.subject, int):
        return show.show_job(args, source, out)
    if args.subject is not None:
        view = ask_slurm(source.door)
        return suspicions.show_node(args.subject, where, view, as_json, out)
    if args.lemons:
        as_list = args.format == "exclude"
        return suspicions.show_lemons(where, ask_slurm(source.door), as_json, as_list, out)
    if args.rules:
        return suspicions.show_rules(where, ask_slurm(source.door), as_json, out)
    return show.show_all(args, source, out)


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


if __name__ == "__main__":
    sys.exit(main())
