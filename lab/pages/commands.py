"""docs/commands.md: every command with its options, from the parsers."""

from __future__ import annotations

from lab.pages.man import form, synopsis
from lab.pages.markup import MARK, cell, code, slug, table
from lab.pages.parsers import NAMES, documented, told

_HEAD = f"""# Commands

{MARK}

Each command prints its options with `--help` (robust-srun: `--robust-help`), has a man page
(`man robust-srun`), and bash completes its options
([how to switch that on](reference.md#completion)). All print their release with `--version`
(robust-srun: `--robust-version`).

"""
_MORE = {
    "robust-srun": "Guides: [start a training](start-training.md), [kinds of jobs](jobs.md). "
    "Settings by subject: [settings](settings.md).",
    "robust-status": "Guide: [robust-status](robust-status.md).",
    "robust-update": "Guide: [new code for a running job](robust-update.md).",
    "robust-ckpt": "Guide: [robust-ckpt](robust-ckpt.md).",
    "robust-standby": "Guide: [standby nodes](standby.md).",
    "robust-health": "Guides: [the node gate](admin.md), [active tests](active-tests.md), "
    "[all checks](checks/README.md).",
    "robust-admin": "Guide: [the node gate](admin.md).",
}
_OTHERS = """## Commands that Slurm or robust-srun starts

`robust-task` is the shim that robust-srun starts in each task slot. `robust-prolog` and
`robust-epilog` are what slurmd's `Prolog` and `Epilog` run, through the stubs that `robust-admin
install` writes. None of them is meant for a shell.
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD.rstrip("\n"), ""]
    rows = []
    for name in NAMES:
        for command in documented(name):
            about = command.about.partition(": ")[0].partition(". ")[0].rstrip(".")
            rows.append((f"[{command.name}](#{slug(command.name)})", cell(about)))
    lines += [*table(("command", "does"), rows), ""]
    for name in NAMES:
        for command in documented(name):
            lines += [f"## {command.name}", "", cell(command.about), ""]
            lines += ["```", f"{command.name} {synopsis(command)}".rstrip(), "```", ""]
            options = command.options()
            shown = [(code(form(action)), cell(told(action))) for action in options]
            if shown:
                lines += [*table(("option", "means"), shown), ""]
            if command.epilog:
                lines += [cell(command.epilog), ""]
        lines += [_MORE[name], ""]
    lines += [_OTHERS.rstrip("\n")]
    return "\n".join(lines) + "\n"
