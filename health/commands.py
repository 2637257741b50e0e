"""The subcommands of robust-health."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, cast

from health import settings as site
from health.check import PLACES, Where
from health.checks import ALL
from health.gate.verdict import Verdict, judge
from health.run.live import LiveSystem, context
from health.run.report import GateReport
from health.run.runner import run
from health.settings import Settings
from health.show import as_json, listing, listing_json, table
from robust_slurm.command_line.errors import JSON_VERSION, CommandError, warn
from robust_slurm.command_line.plain_text import has_colour, styled
from robust_slurm.text import closest, did_you_mean

OPEN, CLOSED, BAD_INPUT = 0, 1, 2
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
    """Run the checks, record them and print the verdict; exit code 0 if all is recorded."""
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
        raise CommandError(
            f"{_said(err, place)}; the recording is incomplete: remove it, or record to "
            "another directory"
        ) from None
    _say_what_root_sees(report)
    _show(report, judge(report, live.settings), options.json)
    if options.json:
        return OPEN
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

    topic = " ".join(options.topic)
    try:
        text = explain(topic, ALL)
    except UnknownTopic as err:
        raise BadInput(str(err)) from None
    _print(options, text, topic=topic, text=text)
    return OPEN


def status(options: Namespace) -> int:
    """The node's drains of the last day, and what the circuit breaker refused on all nodes."""
    from health.children.call import call_in_child
    from health.gate.act import rules_of
    from health.gate.drain_times import lines
    from health.gate.reserve import Refusal, refused_lately

    system = _system(options, "deep")
    settings, now = system.settings, system.now()
    try:
        events = system.history()
    except OSError as err:
        raise BadInput(_said(err, "the node's history")) from None
    node = system.context.node
    refused: Sequence[Refusal] = ()
    drained = lines(node, events, now, rules_of(settings))
    if settings.state_dir:
        since = now - float(settings.breaker["window"])
        refused = call_in_child(lambda: refused_lately(settings.state_dir, since), 5.0)[0] or ()
    refused = [Refusal(*each) for each in refused]  # a child's answer has lists
    told = [f"{each.node}: NOT drained, {each.reason}: {each.why}" for each in refused]
    _print(
        options,
        "\n".join([*drained, *told]),
        node=node,
        drains=drained,
        refused=[each._asdict() for each in refused],
    )
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
    follows, drained = _follows(system)
    event = Event(system.now(), kind, system.boot_id(), data)
    gate = system.settings.gate
    node, state_dir = system.context.node, system.settings.state_dir
    failed = str(history.record(str(gate["spool"]), state_dir, node, [event], 20.0))
    if failed:
        raise CommandError(f"not fully recorded: {failed}")
    what = f"reset of {data['gpu'] or 'all GPUs'}" if options.reset else "repair"
    text = f"{node}: {what} recorded; {follows}"
    _print(options, text, node=node, recorded=kind, drained=drained, text=text)
    return OPEN


def _follows(system: LiveSystem) -> tuple[str, bool | None]:
    """Return what the record leads to, and whether the node is drained; None: not known.

    Raises BadInput for a node that Slurm does not have.
    """
    from health.gate.act import open_door
    from health.gate.undrain import SLURMS_WORDS
    from robust_slurm.drain_reason import PREFIX
    from robust_slurm.slurm import SlurmError

    name = system.context.node
    later = "the next sweep checks the node and undrains it if it is healthy"
    try:
        door = open_door(system.settings)(float(system.settings.gate["scontrol_deadline"]))
        node = door.nodes([name]).get(name)
    except SlurmError as err:
        if err.kind != "not_found":
            return f"{later} (whether it is drained is not known: {err})", None
        node = None
    if node is None:
        raise BadInput(f"Slurm has no node {name}; name this node as Slurm does with --node NAME")
    if "DRAIN" not in node.state:
        return "the node is not drained, so there is nothing to undrain", False
    if not (node.reason or "").startswith((PREFIX, *SLURMS_WORDS)):
        return f"the node stays drained: another than robust-slurm did it ({node.reason})", True
    return later, True


def baseline(options: Namespace) -> int:
    """Record this node's values as the fleet's reference."""
    from health.baseline import FILE, BaselineError, observe, save

    system = _system(options, "deep")
    try:
        found = observe(system, options.host)
        lines = save(system.settings, found, options.add)
    except BaselineError as err:
        raise BadInput(str(err)) from None
    except OSError as err:
        said = _said(err, f"{system.settings.gate['spool']}/{FILE}")
        raise CommandError(f"not recorded: {said}") from None
    text = "\n".join(lines)
    _print(options, text, node=system.context.node, baseline=json.loads(lines[-1]))
    return OPEN


def _print(options: Namespace, text: str, /, **data: Any) -> None:
    print(json.dumps({"version": JSON_VERSION, **data}, indent=1) if options.json else text)


def _system(options: Namespace, where: Where) -> LiveSystem:
    known = context(where, os.environ, options.node)
    return LiveSystem(settings_for(options.config, known.node), known)


def settings_for(named: str | None, node: str, *, strict: bool = True) -> Settings:
    """Return the settings in the file of ``--config``, or the site's.

    BadInput for a file that cannot be read and, if ``strict``, for one that has errors.
    """
    if named:
        try:
            with open(named, "rb"):
                pass
        except OSError as err:
            raise BadInput(f"--config {named}: {err.strerror}") from None
    found = site.load(named or os.environ.get("ROBUST_SITE_CONFIG") or None, node, ALL)
    wrong = [problem for problem in found.problems if problem not in found.notes]
    if named and strict and wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        first = wrong[0].removeprefix(f"{named}: ")
        raise BadInput(f"--config {named}: {first}{more}")
    return found


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
    if word not in PLACES:
        near = did_you_mean(word, PLACES)
        raise BadInput(f"--where {word}: use one of {', '.join(PLACES)}{near}")
    return cast(Where, word)


def _families(text: str, where: Where) -> Sequence[str]:
    """The names in a comma-separated list; BadInput for one that is none or does not run here."""
    wanted = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    known = {check.name: check for check in ALL}
    for name in wanted:
        if name not in known:
            near = [family for family in known if family.startswith(f"{name}_")]
            near = near or [*filter(None, [closest(name, known)])]
            hint = f"did you mean {' or '.join(near)}?" if near else "see robust-health list"
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
    warn("robust-health", f"not root: the kernel's log may be unreadable{told}")


def _show(report: GateReport, verdict: Verdict, as_json_: bool) -> int:
    if as_json_:
        print(as_json(report, verdict))
    else:
        print(table(report, verdict, has_colour(sys.stdout)), file=styled(sys.stdout))
    return CLOSED if verdict.closed else OPEN
