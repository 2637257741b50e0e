"""One change to one or many machines, here or over SSH: plan, show, confirm, apply, report."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from health.admin.node import AdminReply, AdminRequest
from robust_slurm.slurm.values import fold
from robust_slurm.text import counted

Ask = Callable[[Mapping[str, AdminRequest]], dict[str, AdminReply]]
HERE = ""  # the name of the machine at hand


def run(
    requests: Mapping[str, AdminRequest],
    ask: Ask,
    replies: dict[str, AdminReply],
    *,
    yes: bool,
    dry_run: bool,
    out: IO[str],
) -> int:
    """Carry the requests out. Exit code 0 done or nothing to do, 1 a machine failed or "no".

    ``replies`` gets the last reply of each machine.
    """
    looked = ask(requests)
    replies |= looked
    _show(looked, out)
    pending = {name: reply for name, reply in looked.items() if reply.changes}
    failed = any(reply.error for reply in looked.values())
    if not pending or dry_run:
        if list(looked) != [HERE]:
            _table(looked, out)
        if not pending and not failed:
            out.write("nothing to do\n")
        return int(failed)
    if not yes and not confirm(_question(pending)):
        out.write("nothing was changed\n")
        return 1
    orders = {n: requests[n]._replace(expect=reply.identity) for n, reply in pending.items()}
    done = ask(orders)
    replies |= done
    if list(looked) != [HERE]:
        _table(looked | done, out)
    else:
        _say(done[HERE], looked[HERE].notes, out)
    return int(failed or any(reply.error for reply in done.values()))


def confirm(question: str) -> bool:
    """Ask on the terminal. Without one there is nobody to ask: the caller must have said --yes."""
    if not sys.stdin.isatty():
        raise ValueError("no terminal for the confirmation: check with --dry-run, then use --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _question(pending: Mapping[str, AdminReply]) -> str:
    changes = sum(len(reply.changes) for reply in pending.values())
    return f"make {counted(changes, 'change')}{_on(list(pending))}?"


def _on(names: Sequence[str]) -> str:
    return "" if list(names) == [HERE] else f" on {fold(names)}"


def as_data(name: str, reply: AdminReply) -> dict[str, Any]:
    """Return a machine's reply for JSON; the machine at hand has its host name."""
    changes = [{"action": action, "path": path} for action, path, _ in reply.changes]
    return {
        "name": name or socket.gethostname().partition(".")[0],
        "result": _result(reply),
        "changes": changes,
        "notes": list(reply.notes),
        "error": reply.error,
    }


def _result(reply: AdminReply) -> str:
    if reply.error:
        return "FAILED"
    return ("done" if reply.done else "differs") if reply.changes else "same"


def _show(replies: Mapping[str, AdminReply], out: IO[str]) -> None:
    """The changes and notes, each text once with all the machines it is for."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, reply in replies.items():
        lines = [reply.error] if reply.error and name == HERE else []
        for action, path, diff in reply.changes:
            lines.append(diff.rstrip("\n") if diff else f"{action} {path}")
        lines += [f"note: {note}" for note in reply.notes]
        groups.setdefault(tuple(lines), []).append(name)
    for texts, names in groups.items():
        if texts and names != [HERE]:
            out.write(f"==={_on(names)}\n")
        for text in texts:
            out.write(f"{text}\n")


_WORDS = {
    "mkdir": "made",
    "create": "wrote",
    "replace": "replaced",
    "mode": "set the mode of",
    "remove": "removed",
    "rmdir": "removed",
}


def _say(reply: AdminReply, told: Sequence[str], out: IO[str]) -> None:
    """Print the changes made on this machine, and its notes unless in ``told`` (shown before)."""
    if reply.error:
        out.write(f"failed: {reply.error}\n")
        return
    left = {note.split()[1] for note in reply.notes if note.startswith("left: ")}
    for action, path, _ in reply.changes:
        if path not in left:
            out.write(f"{_WORDS.get(action, action)} {path}\n")
    for note in reply.notes:
        if note not in told:
            out.write(f"{note}\n")


def _table(replies: Mapping[str, AdminReply], out: IO[str]) -> None:
    """Print the result of each node; nodes with the same result share a line."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, reply in replies.items():
        paths = ", ".join(path for _, path, _ in reply.changes)
        what = reply.error or paths or "; ".join(reply.notes)
        rows.setdefault((_result(reply), what), []).append(name)
    folded = [(fold(names), *row) for row, names in rows.items()]
    width = max(len(names) for names, _, _ in folded)
    for names, result, what in folded:
        out.write(f"{names:<{width}}  {result:<7}  {what}".rstrip() + "\n")
