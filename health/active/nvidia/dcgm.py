"""NVIDIA's own diagnostic, ``dcgmi diag``, where it is installed: run it, read its verdict.

The output's shape is that of DCGM's sources (dcgmi/Diag.cpp, nvvs/include/NvvsJsonStrings.h) from
2.1 to 4.6: results by GPU number up to 3, by entity since 4; a warning was a text up to 3.1 and has
an id, a category and a severity since (dcgmlib/dcgm_errors.h). A severity alone proves nothing: if
the category says that software prevented the test, the GPU was not tested, and that is no fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from health.active.nvidia import tools
from health.active.nvidia.gpu_use import GpuUse, busy
from health.active_tests import Level
from health.finding import ActionName, Finding

CHECK = "active-dcgm"
RUN_LEVELS: Mapping[Level, int] = {"quick": 1, "standard": 2, "long": 3}
# Least seconds of each run level (DCGM's user guide; 8 GPUs): with less time left, a run would
# only be broken off in the middle.
LEAST_S: Mapping[int, float] = {1: 10.0, 2: 120.0, 3: 600.0, 4: 2700.0}
_ENVIRONMENT = {"PATH": ":".join(tools.FIXED), "LC_ALL": "C"}
_START = "is nv-hostengine running? systemctl start nvidia-dcgm"

_NAMES = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # 4, before
_MONITOR, _ISOLATE, _CONFIG, _RESET = 1, 2, 5, 6  # dcgmErrorSeverity_t; 3 unknown, 4 triage
# dcgmErrorCategory_t: of the machine (performance, Xid, thermal … other hardware).
_HARDWARE = frozenset({1, 2, 5, *range(9, 16)})
_NVML_LIBRARY = 24
_CURES: Mapping[int, ActionName] = {  # dcgmError_t, by DCGM's own advice
    4: "reset-gpu",  # volatile double bit errors
    81: "reset-gpu",  # uncontained error
    120: "reboot",  # fallen off the bus
    126: "reboot",  # the driver asks for one
}
# Tests of the software around a GPU, which 2 and 3 name; their failures are a setting's.
_SETTINGS = frozenset(
    {
        "blacklist", "denylist", "nvml library", "cuda main library", "cuda toolkit libraries",
        "permissions and os blocks", "persistence mode", "environment variables",
        "graphics processes",
    }
)  # fmt: skip
# Said by a test that could not do its work. The last: nvbandwidth right after the burn (DCGM #272).
_NOT_TESTED = re.compile(
    r"allocate|cuda (context|api)|dcgm api|api call|busy or unavailable|aborted|internal error"
    r"|memory copy utilization",
    re.IGNORECASE,
)
_LEFT_OUT = (
    ("already running", "another diagnostic is running"),
    ("mig configuration is incompatible", "MIG is on"),
)


class Warned(NamedTuple):
    """One warning of a result; -1: this version does not say."""

    text: str
    id: int = -1
    category: int = -1
    severity: int = -1


class Result(NamedTuple):
    test: str
    device: str  # "gpu0" by DCGM's number; empty: the node
    status: str  # "pass", "fail", "warn", "skip", "not run"
    warned: tuple[Warned, ...] = ()


def run(
    level: Level,
    limit_s: float,
    *,
    gpus: tuple[GpuUse, ...] = (),
    run_level: int | None = None,
    directories: Sequence[str] = (),
) -> tuple[list[Finding], list[str]]:
    """Run it within ``limit_s``; return findings, and lines on what was left out and why.

    ``run_level``: in place of that of ``level``; only here can it be 4. ``gpus``: as
    they are used; nothing is run while MIG is on or a process uses a GPU.
    """
    wanted = RUN_LEVELS[level] if run_level is None else run_level
    what = f"dcgmi diag -r {wanted}"
    program = tools.find("dcgmi", directories)
    reason = "" if program else "dcgmi is not installed"
    if not reason:
        held = gpus if wanted > 1 else tuple(gpu._replace(processes=()) for gpu in gpus)
        reason = "; ".join(busy(held))
    if not reason and limit_s < LEAST_S[wanted]:
        reason = f"takes {LEAST_S[wanted]:.0f} s or more, {limit_s:.0f} s were left"
    if reason:
        return [], [f"{what}: {reason}"]
    try:
        ran = tools.run([program, "diag", "-r", str(wanted), "-j"], limit_s, _ENVIRONMENT)
    except OSError as err:
        return [_error(f"{what}: {program}: {err.strerror}")], []
    if ran.cut:
        return [
            _error(
                f"{what} {ran.cut}; read /var/log/nvidia-dcgm and look for a running nvvs process"
            )
        ], []
    found, left_out = judge(ran.out, f"{ran.err} (exit code {ran.code})", what)
    if ran.code and not found and not left_out:
        found.append(_error(f"{what}: exit code {ran.code}, but every test in its JSON passed"))
    return found, left_out


def judge(out: str, err: str, what: str = "dcgmi diag") -> tuple[list[Finding], list[str]]:
    """Judge the output of dcgmi; return findings and lines on what was left out. Pure."""
    data = _json(out)
    bodies = [data[name] for name in _NAMES if isinstance(data.get(name), dict)]
    body: dict[str, Any] = bodies[0] if bodies else {}
    problem = body.get("runtime_error")
    if not isinstance(body.get("test_categories"), list) or problem:
        said = " ".join(str(problem or f"{out} {err}").split())
        for words, reason in _LEFT_OUT:
            if words in said.lower():
                return [], [f"{what}: {reason}"]
        if "host engine" in said.lower() or "establish a connection" in said.lower():
            said += f"; {_START}"
        kind = "" if problem else "no result in JSON: "
        return [_error(f"{what}: {kind}{said[:300]}")], []
    serials = _serials(data)
    found: list[Finding] = []
    skipped: dict[str, list[str]] = {}
    for result in results(body):
        if result.status in ("skip", "not run"):
            skipped.setdefault(result.test, []).append(_reason(result))
        else:
            found += _judged(result, serials)
    left_out = [
        f"dcgmi {test}: skipped on {', '.join(sorted(set(where)))}"
        for test, where in skipped.items()
    ]
    if not found and not skipped and not any(True for _ in results(body)):
        found.append(_error(f"{what}: it ran no test"))
    return list(dict.fromkeys(found)), left_out


def results(body: Mapping[str, Any]) -> Iterator[Result]:
    """Every result of the diagnostic, whatever the version wrote."""
    for category in _dicts(body.get("test_categories")):
        for test in _dicts(category.get("tests")):
            name, seen = str(test.get("name", "?")), []
            for entry in _dicts(test.get("results")):
                for device in _devices(entry):
                    seen.append(_result(name, device, entry))
            yield from seen
            summary = test.get("test_summary")
            if isinstance(summary, dict):
                yield from _of_summary(_result(name, "", summary), seen)


def _of_summary(summary: Result, seen: Sequence[Result]) -> Iterator[Result]:
    """Yield a test's summary only where it adds something: errors of no entity, or a test without
    results."""
    told = {warned.text for result in seen for warned in result.warned}
    own = tuple(warned for warned in summary.warned if warned.text not in told)
    if own or all(result.status != summary.status for result in seen):
        yield summary._replace(warned=own)


def _result(name: str, device: str, entry: Mapping[str, Any]) -> Result:
    status = str(entry.get("status", "")).strip().lower()
    return Result(name, device, status, tuple(_warned(entry.get("warnings"))))


def _warned(value: Any) -> Iterator[Warned]:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict):
            text = one.get("warning", one.get("warnings", ""))  # 3.3 says "warnings" in level 1
            numbers = [one.get(f"error_{key}") for key in ("id", "category", "severity")]
            yield Warned(_line(text), *(n if isinstance(n, int) else -1 for n in numbers))
        elif one:
            yield Warned(_line(one))


def _devices(entry: Mapping[str, Any]) -> list[str]:
    """The devices of a result, as "gpu0"; one empty name for the node."""
    if "entity_id" in entry:
        return [f"{str(entry.get('entity_group', 'GPU')).lower()}{entry['entity_id']}"]
    numbers = re.findall(r"\d+", str(entry.get("gpu_ids", entry.get("gpu_id", ""))))
    return [f"gpu{number}" for number in numbers] or [""]


def _judged(result: Result, serials: Mapping[str, str]) -> list[Finding]:
    """The findings of one result that was not skipped."""
    if result.status == "pass" and not result.warned:
        return []
    serial = serials.get(result.device)
    where = f" [serial {serial}]" if serial else ""
    found = []
    for warned in result.warned or (Warned("no reason given"),):
        status, cls, action = _weight(result, warned)
        codes = f" (DCGM error {warned.id}, severity {warned.severity})" if warned.id >= 0 else ""
        text = f"dcgmi {result.test}: {result.status or 'no status'}: {warned.text}{codes}{where}"
        found.append(Finding(status, cls, CHECK, result.device, text, action))
    return found


def _weight(result: Result, warned: Warned) -> tuple[Any, Any, ActionName]:
    """Status, class and action of one warning."""
    if result.status == "pass":  # a test that passed and says more, as memory does (DCGM #284)
        return "WARN", "tool", "none"
    if result.status not in ("fail", "warn"):
        return "ERROR", "tool", "none"
    if _NOT_TESTED.search(warned.text) and warned.severity not in (_ISOLATE, _RESET):
        return "ERROR", "tool", "none"
    if result.test.lower() in _SETTINGS or warned.severity == _CONFIG:
        return "ERROR", "tool", "none"
    if result.status == "warn" or warned.severity == _MONITOR:
        return "WARN", "node", "none"
    if warned.severity == _ISOLATE and warned.id != _NVML_LIBRARY:
        return "FAIL", "node", _CURES.get(warned.id, "service")
    if warned.category >= 0 and warned.category not in _HARDWARE:
        return "ERROR", "tool", "none"
    if warned.severity == _RESET:
        return "FAIL", "node", "reset-gpu"
    return "FAIL", "node", _CURES.get(warned.id, "service")


def _serials(data: Mapping[str, Any]) -> dict[str, str]:
    """Serial numbers by "gpu0": DCGM's numbers need not be those of NVML."""
    old = data.get("GPU Device Serials")
    found = {f"gpu{key}": str(value) for key, value in old.items()} if isinstance(old, dict) else {}
    for group in _dicts(data.get("entity_groups")):
        name = str(group.get("entity_group", "")).lower()
        for entity in _dicts(group.get("entities")):
            if entity.get("serial_num"):
                found[f"{name}{entity.get('entity_id')}"] = str(entity["serial_num"])
    return found


def _json(text: str) -> dict[str, Any]:
    """The first object in the output; lines for people may come before it."""
    start = text.find("{")
    try:
        data = json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _reason(result: Result) -> str:
    text = result.warned[0].text if result.warned else ""
    return f"{result.device or 'the node'}{f' ({text[:120]})' if text else ''}"


def _line(text: Any) -> str:
    return " ".join(str(text).split())[:300]


def _error(text: str) -> Finding:
    return Finding("ERROR", "tool", CHECK, "", text, "none")
