"""``robust-admin install | uninstall | doctor``: the command line."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from health.admin import flow, render, show_config
from health.admin.install import InstallError, WantedFile
from health.admin.node import AdminReply, AdminRequest, perform
from health.admin.options import build_parser
from health.settings_last import SUFFIX
from robust_slurm.command_line import BAD_INPUT, NO
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.run import run
from robust_slurm.slurm.values import expand, fold

MOST_NODES = 20_000
CarryOut = Callable[[AdminRequest], int]


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Run one command; the text for people goes to ``out`` (stdout), errors to stderr."""
    return run(
        build_parser(),
        argv,
        _command,
        out,
        codes={InstallError: BAD_INPUT, ValueError: BAD_INPUT},
        unread=NO,
        interrupted="interrupted; run the same command again to continue",
    )


def _command(args: argparse.Namespace, out: IO[str]) -> int:
    os.umask(0o022)
    command = _COMMANDS[args.command]
    if command is _doctor or not args.json:
        return command(args, out)
    if not (args.yes or args.dry_run):
        raise ValueError("--json asks no questions; add --yes or --dry-run")
    code = command(args, io.StringIO())
    rows = [flow.as_data(name, reply) for name, reply in args.replies.items()]
    json.dump({"version": 1, "machines": rows, "slurm_needs": args.needs}, out, indent=1)
    out.write("\n")
    return code


def _install(args: argparse.Namespace, out: IO[str]) -> int:
    from health.admin.doctor import run as doctor
    from health.admin.doctor import state_dir
    from health.checks import ALL

    carry_out = _on_targets(args, out)
    if args.plugin:
        return _install_plugin(args, carry_out, out)
    own = Path(args.etc) / render.SETTINGS
    there, last = own.exists(), own.with_name(own.name + SUFFIX)
    if not there and last.exists():
        raise InstallError(
            f"{own} is missing, and {last.name} is in force: put it back (cp -p {last} {own}), or "
            f"remove {last.name} too if you want the defaults"
        )
    found = doctor.site_settings(str(own) if there else None)
    problems = [*found.problems, *doctor.job_settings(str(own) if there else None)[1]]
    if found.notes and not args.nodes:  # on the nodes other versions may be in force
        problems.remove(found.notes[0])
        warn("robust-admin", found.notes[0])
    if problems:
        raise InstallError(f"{own} has errors; correct them first: {'; '.join(problems)}")
    prefix = render.find_prefix(args.prefix)
    gate = found.gate
    site = render.Site(prefix, args.etc, args.tmpfiles, gate["spool"], gate["on_missing"])
    template = render.robust_toml(ALL)
    # The file as edited here goes to the nodes; on this host it is compared with the template.
    toml = own.read_text(encoding="utf-8") if args.nodes and there else template
    files = render.node_files(site, toml)
    lines: list[str] = []
    if not args.nodes:
        wants, asked = doctor.ask_wants(args.etc, found.gate)
        fragment = render.fragment(wants, asked)
        files.append(WantedFile(f"{args.etc}/{render.FRAGMENT}", fragment, 0o644))
        lines = [f"{w.where}:  {w.line()}" for w in wants if w.needed and w.level == "fix"]
        args.needs += lines
    request = AdminRequest(
        "install", args.etc, "", files, render.directories(site), prefix.python, prefix.dirs
    )
    code = carry_out(request)
    if not args.dry_run and not code:
        out.write("".join(f"{line}\n" for line in state_dir.make(found.state_dir)))
    if lines and not code:
        out.write(
            f"\nSlurm still needs these settings (reasons in {args.etc}/{render.FRAGMENT}):\n"
        )
        out.write("".join(f"  {line}\n" for line in lines))
        out.write(
            "Apply them only after every node has the files (robust-admin install --nodes ... "
            "--ssh): a node "
            "without\nthem is drained by its next job. Then: scontrol reconfigure; "
            "robust-admin doctor\n"
        )
    return code


def _install_plugin(args: argparse.Namespace, carry_out: CarryOut, out: IO[str]) -> int:
    from health.admin import plugin
    from health.admin.doctor import run as doctor

    prefix = render.find_prefix(args.prefix)
    files = plugin.files(args.etc, args.prefix, args.slurm_include)
    config = doctor.slurm_config()
    made, runs = plugin.built_for(files[0].text), show_config.release(config)
    if made is None or (runs is not None and made != runs):
        built = plugin.release_text(made) if made is not None else "another Slurm"
        raise InstallError(
            f"the headers are those of Slurm {built}, and {config['SLURM_VERSION']} runs: name the "
            "right ones with --slurm-include=DIR"
        )
    top = plugin.directory(args.etc)
    request = AdminRequest(
        "install", top, "", files, plugin.directories(args.etc), prefix.python, prefix.dirs
    )
    code = carry_out(request)
    lines = plugin.site_lines(args.etc, config)
    args.needs += [f"{line.file}:  {line.text}" for line in lines]
    if lines and not code:
        out.write("\nYour own files still need these lines (docs/plugin.md):\n")
        for line in lines:
            out.write(f"\n{line.file}:\n{line.text}")
    return code


def _uninstall(args: argparse.Namespace, out: IO[str]) -> int:
    from health.admin.doctor import run as doctor

    carry_out = _on_targets(args, out)
    if args.plugin:  # Slurm passes by an include of a file that is gone
        from health.admin import plugin

        return carry_out(AdminRequest("uninstall", plugin.directory(args.etc)))
    used = doctor.in_use(args.etc)
    if used is None:
        warn(
            "robust-admin",
            f"{doctor.silence()}: whether Slurm still runs these scripts is not known; if it does, "
            "every job will drain its nodes once the scripts are gone",
        )
    if used:
        raise CommandError(
            f"Slurm still runs {', '.join(used)}, and without the scripts every job would drain "
            "its nodes; remove them from slurm.conf, run scontrol reconfigure, and try again"
        )
    return carry_out(AdminRequest("uninstall", args.etc))


def _doctor(args: argparse.Namespace, out: IO[str]) -> int:
    from health.admin.doctor import run as doctor

    return doctor.main(args.etc, args.json, out)


_COMMANDS = {"install": _install, "uninstall": _uninstall, "doctor": _doctor}


def _on_targets(args: argparse.Namespace, out: IO[str]) -> CarryOut:
    """Return the function that carries a request out on the machines that were named."""
    ask, names = _targets(args)

    def carry_out(request: AdminRequest) -> int:
        requests = dict.fromkeys(names, request)
        return flow.run(requests, ask, args.replies, yes=args.yes, dry_run=args.dry_run, out=out)

    return carry_out


def _targets(args: argparse.Namespace) -> tuple[flow.Ask, list[str]]:
    """The function that asks the machines, and their names."""
    if bool(args.nodes) != args.ssh:
        raise ValueError("--nodes and --ssh must be used together: --nodes 'n[1-99]' --ssh")
    if not args.nodes:
        if os.geteuid() != 0:
            raise ValueError(
                "slurmd runs these files as root, so they must belong to root: use sudo"
            )
        return _here, [flow.HERE]
    try:
        from health.admin import remote
    except ModuleNotFoundError as error:
        raise ValueError(render.lacks(error)) from error
    hosts = remote.known_hosts(args.known_hosts)
    if args.identity:
        _readable("--identity", args.identity)

    @cache
    def access() -> remote.Access:
        prefix = render.find_prefix(args.prefix)
        return remote.Access(args.user, args.port, args.identity, hosts, prefix)

    def ask(requests: Mapping[str, AdminRequest]) -> dict[str, AdminReply]:
        return remote.ask_all(access(), requests)

    return ask, nodes_of(args.nodes)


def _readable(option: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from None


def nodes_of(expression: str) -> list[str]:
    """The names in ``n[1-99]``. Raises ValueError for what is no list of hosts."""
    names = list(expand(expression))
    fold(names)  # so that a name of no node is refused before anything is done
    if not 0 < len(names) <= MOST_NODES:
        raise ValueError(f"--nodes {expression[:80]!r}: must name 1 to {MOST_NODES} nodes")
    return names


def _here(requests: Mapping[str, AdminRequest]) -> dict[str, AdminReply]:
    return {name: perform(request) for name, request in requests.items()}


if __name__ == "__main__":
    sys.exit(main())
