"""The command line of the lab. Exit codes: 0 done, 2 refused or failed; `exec`: the command's."""

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from lab import host
from lab.cluster import Lab
from lab.errors import LabError
from lab.slurm import releases
from lab.slurm.records import parse_state
from lab.spec import HEAD, UID, USER, LabSpec, address, name_range
from lab.verbs import breakage_cli, disruption_cli


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    ours = words[: words.index("--")] if "--" in words else words
    args = _parser().parse_args(ours)
    try:
        if len(ours) < len(words):
            if args.verb != "exec":
                raise LabError("only exec takes a command after --")
            args.command = words[len(ours) + 1 :]
        host.check_host()
        code: int = args.run(args)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab", description="A real Slurm cluster on this machine, with faults."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", default="lab", help="which lab (default: lab)")

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, parents=[common])
        made.set_defaults(run=run)
        return made

    up = verb("up", _up, "bring a lab up")
    up.add_argument("--nodes", type=int, default=4, help="train nodes n1..nN (default 4)")
    up.add_argument("--standby", type=int, default=1, help="standby nodes s1..sN (default 1)")
    up.add_argument("--gpus", type=int, default=0, help="GRES gpu:h100 per node (default 0)")
    up.add_argument("--cpus", type=int, default=8, help="CPUs per node for Slurm (default 8)")
    up.add_argument("--scratch", action="store_true", help="a mount per node for stale-mount")
    up.add_argument("--accounting", action="store_true", help="slurmdbd: accounts, limits, QOS")
    up.add_argument("--kernel", action="store_true", help="user-mode Linux per node: cgroups")
    up.add_argument("--switch", action="append", default=[], metavar="NODES", help="a leaf switch")
    up.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="slurm.conf")
    known = f"{', '.join(releases.SUITES)} (default: ${releases.VARIABLE}, else the host's)"
    up.add_argument("--slurm", default="", metavar="RELEASE", help=known)
    verb("down", _down, "end a lab; nothing of it stays").add_argument("--all", action="store_true")
    verb("status", _status, "show each node's state in the lab and in Slurm")
    verb("env", _env, "print what a shell needs to know about a lab, as exports")
    ex = verb("exec", _exec, "run a command inside a node (`head` is the login node)")
    ex.add_argument("node")
    who = ex.add_mutually_exclusive_group()
    who.add_argument("--user", action="store_true", help=f"as {USER} (default)")
    who.add_argument("--root", action="store_true", help="as root")
    ex.add_argument("--cwd", help="directory to start in")
    ex.add_argument("command", nargs="*", help="after `--`")
    verb("crash", _fault, "link down, then all on the node dies").add_argument("node")
    hang = verb("hang", _hang, "stop all processes of a node, or of one rank of a job (SIGSTOP)")
    hang.add_argument("node", nargs="?")
    hang.add_argument("--job")
    hang.add_argument("--rank", type=int)
    verb("partition", _fault, "take a node's link down").add_argument("node")
    slow = verb("slow", _slow, "limit, delay and drop what goes over a node's link")
    slow.add_argument("node")
    slow.add_argument("rate", nargs="?", default="", help="to the node, as tc: 100mbit, 1gbit")
    slow.add_argument("--delay", type=float, default=0.0, metavar="MS", help="in each direction")
    slow.add_argument("--loss", type=float, default=0.0, metavar="PERCENT", help="both directions")
    verb("heal", _heal, "undo all faults of a node; a crashed one boots").add_argument("node")
    for module in (breakage_cli, disruption_cli):
        module.add_verbs(verb, Lab, lambda what, at: print(f"{what} at {_clock(at)}"))
    for name, made in verbs.choices.items():
        made.set_defaults(verb=name)
    return parser


def _up(args: argparse.Namespace) -> int:
    began = time.monotonic()
    pairs = [item.partition("=") for item in args.conf]
    if any(not eq for _, eq, _ in pairs):
        raise LabError("--conf wants KEY=VALUE, as in slurm.conf")
    spec = LabSpec(
        name=args.name,
        nodes=args.nodes,
        standby=args.standby,
        gpus=args.gpus,
        cpus=args.cpus,
        scratch=args.scratch,
        kernel=args.kernel,
        slurm_conf={key: value for key, _, value in pairs},
        switches=tuple(args.switch),
        accounting=args.accounting,
        slurm=releases.asked(args.slurm),
        visible=host.default_visible(),
    )
    spec = host.bring_up(spec)
    try:
        Lab(spec.name).wait_ready()
    except BaseException:
        host.take_down(spec.name)
        raise
    groups = [spec.train_names, spec.standby_names]
    nodes = " ".join(name_range(g) if spec.routed else " ".join(g) for g in groups if g)
    took = f"{time.monotonic() - began:.1f} s"
    print(f"lab {spec.name} is up in {took}: {nodes}; login node: {HEAD}; Slurm {spec.slurm}")
    return 0


def _down(args: argparse.Namespace) -> int:
    names = host.lab_names() if args.all else [args.name]
    for name in names:
        print(f"lab {name} is {'gone' if host.take_down(name) else 'not up'}")
    return 0


def _status(args: argparse.Namespace) -> int:
    lab = Lab(args.name)
    faults, slurm = lab.faults(), lab.node_records()
    wide = max(16, *map(len, faults.values()))
    print(f"{'NODE':<8}{'ADDRESS':<16}{'LAB':<{wide}} {'SLURM':<23}REASON")
    for name, fault in faults.items():
        record = slurm.get(name, {})
        state = "+".join(sorted(parse_state(record.get("State", "")))) or "-"
        print(f"{name:<8}{address(name):<16}{fault:<{wide}} {state:<23}{record.get('Reason', '')}")
    return 0


def _env(args: argparse.Namespace) -> int:
    lab = Lab(args.name)
    pairs = {
        "LAB_NAME": lab.name,
        "LAB_DIR": str(lab.spec.dir),
        "LAB_SHARED": str(lab.shared),
        "LAB_SCRATCH": str(lab.scratch),
        "LAB_DISK": str(lab.disk),
        "LAB_USER": USER,
        "LAB_UID": str(UID),
        "LAB_LOGIN": HEAD,
        "LAB_NODES": " ".join(lab.spec.train_names),
        "LAB_STANDBY": " ".join(lab.spec.standby_names),
        "SLURM_CONF": str(lab.spec.dir / "etc" / "slurm.conf"),
    }
    for key, value in pairs.items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


def _exec(args: argparse.Namespace) -> int:
    if not args.command:
        raise LabError("nothing to run; say: exec NODE -- command")
    lab, user = Lab(args.name), not args.root
    more = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    entry = lab.entry(args.node, args.command, user=user, cwd=args.cwd)
    sys.stdout.flush()
    os.execve(entry[0], entry, lab.environ(user=user, env=more))


def _fault(args: argparse.Namespace) -> int:
    reply = Lab(args.name).ask(args.verb, node=args.node)
    print(f"{args.verb} {args.node} at {_clock(reply['time'])}")
    return 0


def _hang(args: argparse.Namespace) -> int:
    by_rank = args.job is not None and args.rank is not None
    if by_rank == (args.node is not None) or (args.job is None) != (args.rank is None):
        raise LabError("say which: hang NODE, or hang --job J --rank R")
    if not by_rank:
        return _fault(args)
    reply = Lab(args.name).ask("hang_rank", job=args.job, rank=str(args.rank))
    what = f"rank {args.rank} of job {args.job} on {reply['node']}"
    print(f"hang {what} at {_clock(reply['time'])} ({len(reply['pids'])} processes)")
    return 0


def _slow(args: argparse.Namespace) -> int:
    if not (args.rate or args.delay or args.loss):
        raise LabError("slow: give a rate, --delay or --loss")
    at = Lab(args.name).slow(args.node, args.rate, delay_ms=args.delay, loss_percent=args.loss)
    print(f"slow {args.node} at {_clock(at)}")
    return 0


def _heal(args: argparse.Namespace) -> int:
    began = time.monotonic()
    Lab(args.name).heal(args.node)
    print(f"heal {args.node}: usable after {time.monotonic() - began:.1f} s")
    return 0


def _clock(at: float) -> str:
    local = datetime.datetime.fromtimestamp(at).astimezone()
    return f"{local.isoformat(timespec='milliseconds')} ({at:.6f})"
