"""``robust-admin install | uninstall | doctor``: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from health.admin import flow, render, show_config
from health.admin.install import ETC, InstallError, WantedFile
from health.admin.node import AdminReply, AdminRequest, perform
from health.settings_last import SUFFIX
from robust_slurm.command_line.parser import Parser
from robust_slurm.slurm.values import expand, fold

MOST_NODES = 20_000
_EPILOG = """\
exit codes: 0 done, or nothing to do; 1 a machine failed, the answer was no, or (doctor) there is
something to fix; 2 bad input, nothing was changed, or (doctor) Slurm could not be asked; 130 ^C."""


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Run one command; the text for people goes to ``out`` (stdout), errors to stderr."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the usage, or the help
        return stop.code if isinstance(stop.code, int) else 2
    target = sys.stdout if out is None else out
    os.umask(0o022)
    try:
        return int(args.run(args, target))
    except (InstallError, ValueError) as error:
        print(f"robust-admin: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `robust-admin doctor | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("robust-admin: interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def build_parser() -> Parser:
    parser = Parser(
        prog="robust-admin",
        description="install the node gate, and check Slurm's configuration",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    etc = Parser(add_help=False)
    etc.add_argument(
        "--etc",
        default=ETC,
        metavar="DIR",
        type=_absolute,
        help=f"directory of the stubs and robust.toml (default: {ETC})",
    )
    change = Parser(add_help=False, parents=[etc])
    change.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    change.add_argument("--dry-run", action="store_true", help="only show what would change")
    nodes = change.add_argument_group("nodes over SSH (default: this machine)")
    nodes.add_argument(
        "--nodes", metavar="n[1-99]", help="run on these nodes instead of this machine"
    )
    nodes.add_argument("--ssh", action="store_true", help="connect to the nodes by SSH")
    nodes.add_argument("--user", default="root", help="log in as this user (default: root)")
    nodes.add_argument("--port", type=_port, default=22, help="SSH port (default: 22)")
    nodes.add_argument("--identity", default="", metavar="FILE", help="private key for SSH")
    nodes.add_argument(
        "--known-hosts",
        default="",
        metavar="FILE",
        help="host keys (default: ~/.ssh/known_hosts and /etc/ssh/ssh_known_hosts)",
    )
    where = Parser(add_help=False)
    where.add_argument(
        "--prefix",
        default=sys.prefix,
        metavar="DIR",
        type=_absolute,
        help="where robust-slurm is installed, here and on the nodes (default: %(default)s)",
    )
    where.add_argument(
        "--tmpfiles",
        default=render.TMPFILES,
        metavar="DIR",
        help="directory of systemd's tmpfiles.d (default: %(default)s; empty: write none)",
    )
    plugin = Parser(add_help=False)
    part = plugin.add_mutually_exclusive_group()
    part.add_argument(
        "--plugin",
        action="store_true",
        help="the SPANK plugin for srun, sbatch and salloc (--robust) instead of the node gate",
    )
    part.add_argument(
        "--controller",
        action="store_true",
        help="the hooks that slurmctld runs (EpilogSlurmctld) instead of the node gate",
    )
    install = commands.add_parser(
        "install",
        parents=[change, where, plugin],
        help="install the node gate, the plugin, or the hooks",
    )
    install.add_argument(
        "--slurm-include",
        default="",
        metavar="DIR",
        help="directory that holds slurm/spank.h, to compile the plugin (default: Slurm's own)",
    )
    install.set_defaults(run=_install)
    uninstall = commands.add_parser(
        "uninstall",
        parents=[change, where, plugin],
        help="uninstall the node gate, the plugin, or the hooks",
    )
    uninstall.set_defaults(run=_uninstall)
    doctor = commands.add_parser(
        "doctor", parents=[etc], help="report what is wrong and how to fix it"
    )
    doctor.json_option()
    doctor.set_defaults(run=_doctor)
    return parser


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"not an absolute path: {text!r}")
    return text.rstrip("/") or "/"


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}")
    return int(text)


def _install(args: argparse.Namespace, out: IO[str]) -> int:
    from health.admin.doctor import run as doctor
    from health.admin.doctor import state_dir
    from health.checks import ALL

    ask, names = _targets(args)
    if args.plugin:
        return _install_plugin(args, ask, names, out)
    if args.controller:
        return _install_controller(args, ask, names, out)
    own = Path(args.etc) / render.SETTINGS
    there, last = own.exists(), own.with_name(own.name + SUFFIX)
    if not there and last.exists():
        raise InstallError(
            f"{own} is missing, and {last.name} is in force: put it back (cp -p {last} {own}), or "
            f"remove {last.name} too if you want the defaults"
        )
    found = doctor.site_settings(str(own) if there else None)
    if args.nodes and found.problems:
        raise InstallError(f"{own} has errors; correct them first: {'; '.join(found.problems)}")
    prefix = render.find_prefix(args.prefix)
    gate = found.gate
    site = render.Site(prefix, args.etc, args.tmpfiles, gate["spool"], gate["on_missing"])
    template = render.robust_toml(ALL)
    # What the admin edited here goes to the nodes; here itself it is compared with the template.
    toml = own.read_text(encoding="utf-8") if args.nodes and there else template
    files = render.node_files(site, toml)
    lines: list[str] = []
    if not args.nodes:
        wants, asked = doctor.ask_wants(args.etc, found.gate)
        fragment = render.fragment(wants, asked)
        files.append(WantedFile(f"{args.etc}/{render.FRAGMENT}", fragment, 0o644))
        lines = [f"{w.where}:  {w.line()}" for w in wants if w.needed and w.level == "fix"]
    request = AdminRequest("install", args.etc, "", files, render.directories(site), *prefix)
    code = _run(dict.fromkeys(names, request), ask, args, out)
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


def _install_plugin(args: argparse.Namespace, ask: flow.Ask, names: list[str], out: IO[str]) -> int:
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
    request = AdminRequest("install", top, "", files, plugin.directories(args.etc), *prefix)
    code = _run(dict.fromkeys(names, request), ask, args, out)
    lines = plugin.site_lines(args.etc, config)
    if lines and not code:
        out.write("\nYour own files still need these lines (docs/plugin.md):\n")
        for line in lines:
            out.write(f"\n{line.file}:\n{line.text}")
    return code


def _install_controller(
    args: argparse.Namespace, ask: flow.Ask, names: list[str], out: IO[str]
) -> int:
    from health.admin import controller
    from health.admin.doctor import run as doctor

    prefix, config = render.find_prefix(args.prefix), doctor.slurm_config()
    files, top = controller.files(args.etc, prefix, config), controller.directory(args.etc)
    request = AdminRequest("install", top, "", files, controller.directories(args.etc), *prefix)
    code = _run(dict.fromkeys(names, request), ask, args, out)
    lines = controller.site_lines(args.etc, config, doctor.runs(config, controller.KEYS))
    if lines and not code:
        out.write(
            "\nSlurm still needs these lines; then restart slurmctld (from 23.11 on, scontrol "
            "reconfigure is enough):\n"
        )
        for line in lines:
            out.write(f"  # {controller.WHY[line.key]}\n  {line.where}:  {line.line}\n")
    return code


def _uninstall(args: argparse.Namespace, out: IO[str]) -> int:
    from health.admin.doctor import run as doctor

    ask, names = _targets(args)
    if args.plugin:  # Slurm passes by an include of a file that is gone
        from health.admin import plugin

        gone = AdminRequest("uninstall", plugin.directory(args.etc))
        return _run(dict.fromkeys(names, gone), ask, args, out)
    if args.controller:
        return _uninstall_controller(args, ask, names, out)
    used = doctor.in_use(args.etc)
    if used is None:
        print(
            "robust-admin: Slurm did not answer whether it still runs these scripts; if it does, "
            "every job will drain its nodes once the scripts are gone",
            file=sys.stderr,
        )
    if used:
        print(
            f"robust-admin: Slurm still runs {', '.join(used)}, and without the scripts every job "
            f"would drain its nodes: remove them from slurm.conf, run scontrol reconfigure, and "
            f"try again",
            file=sys.stderr,
        )
        return 1
    request = AdminRequest("uninstall", args.etc)
    return _run(dict.fromkeys(names, request), ask, args, out)


def _uninstall_controller(
    args: argparse.Namespace, ask: flow.Ask, names: list[str], out: IO[str]
) -> int:
    from health.admin import controller
    from health.admin.doctor import run as doctor

    config = doctor.slurm_config()
    used = controller.named(args.etc, config, doctor.runs(config, controller.KEYS))
    if used or not config:
        what = f"slurmctld still runs {', '.join(used)}" if used else "Slurm did not answer"
        print(
            f"robust-admin: {what}; without the script that PrologSlurmctld names jobs may go back "
            "to the queue: remove the lines from slurm.conf, restart slurmctld, and try again",
            file=sys.stderr,
        )
        return 1
    request = AdminRequest("uninstall", controller.directory(args.etc))
    return _run(dict.fromkeys(names, request), ask, args, out)


def _doctor(args: argparse.Namespace, out: IO[str]) -> int:
    from health.admin.doctor import run as doctor

    return doctor.main(args.etc, args.json, out)


def _run(
    requests: Mapping[str, AdminRequest], ask: flow.Ask, args: argparse.Namespace, out: IO[str]
) -> int:
    return flow.run(
        requests, ask, yes=args.yes, dry_run=args.dry_run, out=out, confirm=flow.confirm
    )


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
    if args.identity and not Path(args.identity).is_file():
        raise ValueError(f"--identity {args.identity}: no such file")
    python = f"{args.prefix}/bin/python3"
    access = remote.Access(args.user, args.port, args.identity, hosts, python)
    return partial(remote.ask_all, access), nodes_of(args.nodes)


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
