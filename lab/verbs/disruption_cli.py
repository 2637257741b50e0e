"""The verbs of the lab's command line for several nodes at once and for Slurm's daemons."""

import argparse
from collections.abc import Callable

from lab.keeper.outages import ACTIONS, DAEMONS
from lab.verbs.disruption import Disruption

Verb = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
Open = Callable[[str], Disruption]
Done = Callable[[str, float], None]


def add_verbs(verb: Verb, lab: Open, done: Done) -> None:
    """Add the verbs with `verb`; `lab` opens a lab by name, `done` prints what was done."""

    def mount(args: argparse.Namespace) -> int:
        opened = lab(args.name)
        at = getattr(opened, args.verb)(args.nodes, args.path)
        done(f"{args.verb} {args.nodes} {args.path or opened.spec.scratch_dir}", at)
        return 0

    def timed(args: argparse.Namespace) -> int:
        at = getattr(lab(args.name), args.verb)(args.nodes, args.seconds)
        ends = f" for {args.seconds:g} s" if args.seconds else ""
        done(f"{args.verb} {args.nodes}{ends}", at)
        return 0

    def reconnect(args: argparse.Namespace) -> int:
        done(f"reconnect {args.nodes}", lab(args.name).reconnect(args.nodes))
        return 0

    def daemon(args: argparse.Namespace) -> int:
        at = lab(args.name).daemon(args.node, args.daemon, args.action)
        done(f"daemon {args.node} {args.daemon} {args.action}", at)
        return 0

    for name, run, text in (
        ("stall", mount, "a mount of the nodes stops answering; resume lets it go on"),
        ("resume", mount, "a stalled mount answers again"),
        ("outage", timed, "the links of the nodes go down at once"),
        ("pause", timed, "the nodes pause like virtual machines: processes and kernel"),
        ("reconnect", reconnect, "an outage or a pause ends"),
    ):
        made = verb(name, run, text)
        made.add_argument("nodes", help="as Slurm writes them: n1, n[1-3],s1")
        if run is mount:
            made.add_argument("path", nargs="?", help="default: the nodes' scratch")
        elif run is timed:
            help_text = "end by itself after so many seconds (default: at reconnect or heal)"
            made.add_argument("seconds", nargs="?", type=float, default=0.0, help=help_text)
    made = verb("daemon", daemon, "freeze, thaw, stop or start a daemon of Slurm's")
    made.add_argument("node", help="head for slurmctld and munged")
    made.add_argument("daemon", choices=list(DAEMONS))
    made.add_argument("action", choices=[*ACTIONS, "start"])
