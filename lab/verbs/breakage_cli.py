"""The verbs of the lab's command line that break hardware."""

import argparse
from collections.abc import Callable
from typing import Any

from lab.errors import LabError
from lab.machine.gpu_faults import LOST, THROTTLE
from lab.machine.hardware import HCAS
from lab.verbs.breakage import Breakage

Verb = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
Open = Callable[[str], Breakage]
Done = Callable[[str, float], None]


def add_verbs(verb: Verb, lab: Open, done: Done) -> None:
    """Add the verbs with `verb`; `lab` opens a lab by name, `done` prints what was done, when."""

    def gpu(args: argparse.Namespace) -> int:
        wanted = _gpu_arguments(args)
        if not wanted:
            raise LabError("gpu: say what to do, such as --xid 79 or --heal")
        at = lab(args.name).gpu(args.node, args.index, **wanted)
        which = "" if args.index is None else f" {args.index}"
        done(f"gpu {args.node}{which} {' '.join(wanted)}", at)
        return 0

    def link(args: argparse.Namespace) -> int:
        at = lab(args.name).link(args.node, up=args.up, port=args.port)
        done(f"link {args.node} {args.port} {'up' if args.up else 'down'}", at)
        return 0

    def kmsg(args: argparse.Namespace) -> int:
        done(f"kmsg {args.node}", lab(args.name).kmsg(args.node, args.text, args.level))
        return 0

    def fill(args: argparse.Namespace) -> int:
        at = lab(args.name).fill(args.node, args.path, args.leave)
        done(f"fill {args.node} {args.path}", at)
        return 0

    def stale(args: argparse.Namespace) -> int:
        opened = lab(args.name)
        at = opened.stale_mount(args.node, args.path, heal=args.heal)
        what = "heal" if args.heal else "stale"
        done(f"{what} {args.node} {args.path or opened.scratch}", at)
        return 0

    _gpu_parser(verb("gpu", gpu, "break or mend a node's GPU, or its NVML"))

    made = verb("link", link, "an InfiniBand port of a node goes down or up")
    made.add_argument("node")
    way = made.add_mutually_exclusive_group(required=True)
    way.add_argument("--down", dest="up", action="store_false")
    way.add_argument("--up", dest="up", action="store_true")
    made.add_argument("--port", default=HCAS[0], choices=HCAS, help="default %(default)s")

    made = verb("kmsg", kmsg, "the node's kernel logs a line")
    made.add_argument("node")
    made.add_argument("text")
    made.add_argument("--level", type=int, default=4, help="severity, 0-7 (default 4, warning)")

    made = verb("fill", fill, "fill a file system of the node's own")
    made.add_argument("node")
    made.add_argument("path", help="/tmp, /dev/shm or slurmd's spool")
    made.add_argument("--leave", default="0", help="bytes to leave free, or N%% of the size")

    made = verb("stale-mount", stale, "a mount of the node answers nothing any more")
    made.add_argument("node")
    made.add_argument("path", nargs="?", help="default: the node's scratch")
    made.add_argument("--heal", action="store_true", help="end it; who waits gets an error")


def _gpu_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("node")
    add("index", type=int, nargs="?", help="which GPU, as NVML counts; none: the node's NVML")
    add("--xid", type=int, metavar="CODE", help="the driver logs an Xid")
    add("--text", default="", help="the Xid's text (default: one that is usual for the code)")
    add("--ecc", type=int, nargs="?", const=1, metavar="N",
        help="N uncorrectable ECC errors (default 1)")  # fmt: skip
    add("--lost", nargs="?", const=LOST[0], choices=LOST, help="off the bus (default handle)")
    add("--remap-failed", action="store_true", help="a row could not be remapped")
    add("--remap-pending", action="store_true", help="a row is remapped at the next reset")
    add("--pcie-width", type=int, metavar="N", help="lanes of its PCIe link")
    add("--recovery-action", type=int, metavar="N", help="the driver's own word: 0 none … 4")
    add("--temp", type=int, metavar="C", help="temperature in degrees Celsius")
    add("--throttle", metavar="NAMES", help=", ".join(THROTTLE))
    add("--nvml-hang", nargs="?", const="sleep", choices=("sleep", "dstate"),
        help="NVML does not return: sleep (SIGKILL ends it), dstate (nothing does)")  # fmt: skip
    add("--driver", metavar="VERSION", help="the driver's version (of the node)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of nvml.state")
    add("--reset", action="store_true", help="what nvidia-smi --gpu-reset cures is cured")
    add("--heal", action="store_true", help="all is well again")


_GPU_FLAGS = (
    *("xid", "ecc", "lost", "remap_failed", "remap_pending", "pcie_width", "recovery_action"),
    *("temp", "throttle", "nvml_hang", "driver", "reset", "heal"),
)


def _gpu_arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in _GPU_FLAGS}
    wanted = {n: value for n, value in given.items() if value is not None and value is not False}
    if args.text:
        wanted["text"] = args.text
    pairs = [item.partition("=") for item in args.set]
    if any(not equals for _, equals, _ in pairs):
        raise LabError("--set wants KEY=VALUE, as in nvml.state")
    if pairs:
        wanted["set"] = {key: value for key, _, value in pairs}
    return wanted
