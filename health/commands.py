"""The subcommands of robust-health."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import cast

from health import settings as site
from health.check import EVERYWHERE, Where
from health.checks import ALL
from health.gate.verdict import Verdict, judge
from health.run.live import LiveSystem, context
from health.run.report import GateReport
from health.run.runner import run
from health.settings import Settings
from health.show import as_json, listing, listing_json, table

OPEN, CLOSED, BAD_INPUT = 0, 1, 2
PLACES: tuple[Where, ...] = ("prolog", "epilog", "sweep", "deep")
_PATIENT_S = 60.0  # the least that a person waits for all checks


class BadInput(Exception):
    """A request that cannot be carried out; the text says why, and what is possible."""


def check(options: Namespace) -> int:
    """Run the checks here and show them."""
    where = _where(options.where)
    only = _families(options.only, where)
    system = _system(options, where)
    report = run(system, ALL, where, _deadline(system.settings, where), only)
    _say_what_root_sees(report)
    return _show(report, judge(report, system.settings), options.json)


def record(options: Namespace) -> int:
    """Run the checks and keep the tree; the verdict is shown, the exit code is that of the tree."""
    from health.recording.record import RecordingSystem

    where = _where(options.where)
    live = _system(options, where)
    place = options.directory
    try:
        system = RecordingSystem(live, place)
    except (OSError, ValueError) as err:
        raise BadInput(f"{_said(err, place)}; name a directory that can be created") from None
    try:
        report = run(system, ALL, where, _deadline(live.settings, where), seen=system.saw)
        system.finish()
    except OSError as err:
        said = (
            f"{_said(err, place)}; the recording is incomplete: remove it, or record to "
            "another directory"
        )
        print(f"robust-health record: {said}", file=sys.stderr)
        return CLOSED
    _say_what_root_sees(report)
    _show(report, judge(report, live.settings), False)
    print(
        f"\nrecorded in {place}, with serial numbers, PCI addresses, names of processes, "
        "mounts and hosts, and of the environment only SLURM_*.\n"
        f"To run the checks on it: robust-health replay {place}"
    )
    return OPEN


def replay(options: Namespace) -> int:
    """The verdict of a recorded tree."""
    from health.recording.replay import BadTree, ReplaySystem

    try:
        system = ReplaySystem(options.directory, ALL)
        only = _families(options.only, cast(Where, system.context.where))
        report = system.report(only)
    except (BadTree, OSError) as err:
        raise BadInput(_said(err, options.directory)) from None
    return _show(report, judge(report, system.settings), options.json)


def list(options: Namespace) -> int:
    """All families and their conditions."""
    print(listing_json(ALL) if options.json else listing(ALL))
    return OPEN


def explain(options: Namespace) -> int:
    """The page on a family, a finding or an Xid."""
    from health.explain import UnknownTopic, explain

    try:
        print(explain(" ".join(options.topic), ALL))
    except UnknownTopic as err:
        raise BadInput(str(err)) from None
    return OPEN


def status(options: Namespace) -> int:
    """The node's drains of the last day, and what the circuit breaker refused on all nodes."""
    from health.children.call import call_in_child
    from health.gate.act import rules_of
    from health.gate.drain_times import lines
    from health.gate.reserve import refused_lately

    system = _system(options, "deep")
    settings, now = system.settings, system.now()
    try:
        events = system.history()
    except OSError as err:
        raise BadInput(_said(err, "the node's history")) from None
    print("\n".join(lines(system.context.node, events, now, rules_of(settings))))
    if settings.state_dir:
        since = now - float(settings.breaker["window"])
        refused, _ = call_in_child(lambda: refused_lately(settings.state_dir, since), 5.0)
        for _, node, _, reason, why, _ in refused or []:
            print(f"{node}: NOT drained, {reason}: {why}")
    return OPEN


def repaired(options: Namespace) -> int:
    """Write the event that the sweep waits for before it undrains."""
    from health.history import events as history
    from health.node.system import Event

    system = _system(options, "deep")
    data = {"note": options.note[:400], "by": os.environ.get("SUDO_USER", "") or str(os.getuid())}
    kind = "repaired"
    if options.reset:
        kind = "reset"
        data |= {"gpu": _pci(system, options.reset), "source": "person"}
    event = Event(system.now(), kind, system.boot_id(), data)
    gate = system.settings.gate
    node, state_dir = system.context.node, system.settings.state_dir
    failed = str(history.record(str(gate["spool"]), state_dir, node, [event], 20.0))
    if failed:
        print(f"robust-health repaired: not fully recorded: {failed}", file=sys.stderr)
        return CLOSED
    what = f"reset of {data['gpu'] or 'all GPUs'}" if options.reset else "repair"
    print(
        f"{node}: {what} recorded; the next sweep checks the node and undrains it if it is healthy"
    )
    return OPEN


def baseline(options: Namespace) -> int:
    """Record what this node has as what the fleet should have."""
    from health.baseline import FILE, BaselineError, observe, save

    system = _system(options, "deep")
    try:
        found = observe(system, options.host)
        lines = save(system.settings, found, options.add)
    except BaselineError as err:
        raise BadInput(str(err)) from None
    except OSError as err:
        said = _said(err, f"{system.settings.gate['spool']}/{FILE}")
        print(f"robust-health baseline: not recorded: {said}", file=sys.stderr)
        return CLOSED
    print("\n".join(lines))
    return OPEN


def _system(options: Namespace, where: Where) -> LiveSystem:
    path = options.config or os.environ.get("ROBUST_SITE_CONFIG") or None
    known = context(where, os.environ, options.node)
    settings = site.load(path, known.node, ALL)
    if options.config and not os.path.isfile(options.config):  # noqa: PTH113
        what = "not a file" if os.path.exists(options.config) else "no such file"  # noqa: PTH110
        raise BadInput(f"--config {options.config}: {what}")
    return LiveSystem(settings, known)


def _said(err: OSError | ValueError, place: str) -> str:
    """Describe an error and its place, without Python's words around it."""
    if isinstance(err, OSError):
        return f"{err.filename or place}: {err.strerror or err}"
    return str(err)


def _deadline(settings: Settings, where: Where) -> float:
    return (
        max(_PATIENT_S, settings.deadline(where)) if where == "deep" else settings.deadline(where)
    )


def _where(word: str) -> Where:
    if word not in EVERYWHERE:
        raise BadInput(f"--where {word}: use one of {', '.join(PLACES)}")
    return cast(Where, word)


def _families(text: str, where: Where) -> Sequence[str]:
    """The names in a comma-separated list; BadInput for one that is none or does not run here."""
    wanted = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    known = {check.name: check for check in ALL}
    for name in wanted:
        if name not in known:
            import difflib

            close = [family for family in known if family.startswith(f"{name}_")]
            close = close or difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {' or '.join(close)}?" if close else "see robust-health list"
            raise BadInput(f"--only {name}: no such family; {hint}")
        if where not in known[name].where:
            places = ", ".join(place for place in PLACES if place in known[name].where)
            raise BadInput(f"--only {name}: does not run in {where}; it runs in {places}")
    return wanted


def _pci(system: LiveSystem, text: str) -> str:
    """The PCI address of "gpu3", "3" or a PCI address; "" for "all"."""
    if text == "all":
        return ""
    snapshot = system.nvml()
    for device in [*snapshot.get("devices", []), *snapshot.get("lost", [])]:
        pci = device.get("pci", "")
        if text.lower() in (pci, f"gpu{device.get('index')}", str(device.get("index"))) and pci:
            return pci
    there = ", ".join(d.get("pci", "?") for d in snapshot.get("devices", [])) or "no GPU"
    why = f" ({snapshot['error']})" if snapshot.get("error") else ""
    raise BadInput(f"--reset {text}: NVML shows {there}{why}; use one of these, or all")


def _say_what_root_sees(report: GateReport) -> None:
    if os.geteuid() == 0:
        return
    unread = [f.check for f in report.findings if "PermissionError" in f.evidence]
    told = f"; not readable: {', '.join(unread)}" if unread else ""
    print(f"robust-health: not root: the kernel's log may be unreadable{told}", file=sys.stderr)


def _show(report: GateReport, verdict: Verdict, as_json_: bool) -> int:
    if as_json_:
        print(as_json(report, verdict))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(table(report, verdict, colour))
    return CLOSED if verdict.closed else OPEN
