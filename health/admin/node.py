"""One machine's part of an install: a request in, a reply out, both plain JSON.

The same on the machine at hand and behind SSH, where ``python -I -m health.admin.node`` reads the
request from stdin and prints the reply behind MARK. Standard library and filelock only, since it
runs with what a node has.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from health.admin import install, trust
from health.admin.install import Directory, InstallError, InstallPlan, WantedFile
from health.admin.plan import identity, paths_to_look_at, plan_install, plan_uninstall
from health.settings_last import keep

PROTOCOL = 1
MARK = "robust-admin-reply:"
LOCK_S = 30.0
PROBE_S = 30.0
# The modules that the stubs start or that are imported later, and the one for GPUs.
MODULES = ("prolog.cli", "epilog.cli", "health.cli", "health.gate.gate", "health.sweep")
NVML = "pynvml"

# Runs as a stub runs: without site, the package directories behind the standard library's.
_PROBE = """
import importlib, json, sys
sys.path += json.loads(sys.argv[1])
found = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
        found[name] = ""
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
families = getattr(sys.modules.get("health.checks"), "ALL", ())
broken = [family.name for family in families if not family.conditions]
print(json.dumps([found, broken]))
"""


class AdminRequest(NamedTuple):
    """``op`` "install" or "uninstall". ``expect``: the identity of the plan to carry out; empty:
    only say what would be done. ``python`` and ``dirs``: the stubs' interpreter and sys.path."""

    op: str
    etc: str
    expect: str = ""
    files: Sequence[WantedFile] = ()
    directories: Sequence[Directory] = ()
    python: str = ""
    dirs: Sequence[str] = ()

    def as_json(self) -> str:
        return json.dumps({"protocol": PROTOCOL, **self._asdict()})

    @classmethod
    def from_json(cls, text: str) -> AdminRequest:
        found = json.loads(text)
        if found.pop("protocol", None) != PROTOCOL:
            raise InstallError("another version of robust-slurm is installed there: update it")
        found["files"] = [WantedFile(*row) for row in found["files"]]
        found["directories"] = [Directory(*row) for row in found["directories"]]
        return cls(**found)


class AdminReply(NamedTuple):
    """``identity`` of the plan, what each change shows, what was done about it."""

    error: str = ""
    identity: str = ""
    changes: Sequence[Sequence[str]] = ()  # (action, path, diff)
    notes: Sequence[str] = ()
    done: bool = False


def perform(request: AdminRequest) -> AdminReply:
    """Plan, and with ``expect`` carry out. Every failure is in ``error``, nothing is raised."""
    try:
        notes: list[str] = []
        if request.op == "install":
            places = [directory.path for directory in request.directories]
            trust.demand(request.python, request.dirs, places)
            notes = probe(request.python, request.dirs)
        if not request.expect:
            plan = _plan(request)
            return _reply(plan, [*notes, *plan.notes])
        with _lock():
            plan = _plan(request)
            if identity(plan) != request.expect:
                raise InstallError(
                    "the files changed since they were checked: run the command again"
                )
            install.clear_drafts(request.etc, install.read_manifest(request.etc))
            left = install.apply(plan)
            kept = [keep(file.path) for file in request.files if file.settings]
            left += [problem for problem in kept if problem]
        return _reply(plan, [*notes, *plan.notes, *left], done=True)
    except InstallError as error:
        return AdminReply(error=str(error))
    except OSError as error:
        return AdminReply(error=f"{error.filename or request.etc}: {error.strerror or error}")


def _reply(plan: InstallPlan, notes: Sequence[str], done: bool = False) -> AdminReply:
    shown = [(change.action, change.path, change.diff) for change in plan.changes]
    return AdminReply("", identity(plan), shown, notes, done)


def _plan(request: AdminRequest) -> InstallPlan:
    manifest = install.read_manifest(request.etc)
    paths = paths_to_look_at(request.files, request.directories, manifest)
    present = {path: install.read_path(path) for path in paths}
    if request.op == "uninstall":
        return plan_uninstall(manifest, present, request.etc)
    site = {"python": request.python, "dirs": list(request.dirs)}
    return plan_install(
        request.files,
        request.directories,
        present,
        manifest,
        os.geteuid(),
        request.etc,
        site,
    )


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """At most one robust-admin changes this machine; only root can hold the lock."""
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError as error:
        raise InstallError(
            f"{sys.executable} cannot import {error.name}: pip install 'robust-slurm[admin]'"
        ) from error
    directory = "/run" if os.geteuid() == 0 else tempfile.gettempdir()
    path = f"{directory}/robust-admin-{os.geteuid()}.lock"
    try:
        with FileLock(path, timeout=LOCK_S, mode=0o600):
            yield
    except Timeout:
        raise InstallError(
            f"another robust-admin holds {path} for {LOCK_S:g} s: wait until it ends"
        ) from None


def probe(python: str, dirs: Sequence[str]) -> list[str]:
    """Prove that the stubs would start; return notes on missing parts that they can do without.

    Runs the prefix's code: look at it with ``trust.demand`` before.
    A prolog that cannot start closes its node, so nothing is installed then.
    """
    modules = [*MODULES, NVML]
    argv = [python, "-IS", "-c", _PROBE, json.dumps(list(dirs)), json.dumps(modules)]
    hint = trust.HINT
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise InstallError(f"{python} does not start: {error.strerror}; {hint}") from error
    except subprocess.TimeoutExpired:
        raise InstallError(f"{python} did not answer in {PROBE_S:g} s; is its disk dead?") from None
    try:
        found, broken = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr or done.stdout).strip()[-300:]
        raise InstallError(f"{python} -IS failed ({done.returncode}): {said}") from None
    bad = [f"{name} ({found[name]})" for name in MODULES if found[name]]
    bad += [f"the check {name}" for name in broken]
    if bad:
        raise InstallError(
            f"{python} cannot import {', '.join(bad)} from {', '.join(dirs)}; {hint}"
        )
    if found[NVML]:
        return [f"{python} cannot import {NVML}: nodes with GPUs would be closed by the nvml check"]
    return []


def main() -> int:
    """Exit code 0 also for a reply that is an error: it was answered."""
    os.umask(0o022)
    try:
        reply = perform(AdminRequest.from_json(sys.stdin.read()))
    except InstallError as error:
        reply = AdminReply(error=str(error))
    print(MARK + json.dumps(reply._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
