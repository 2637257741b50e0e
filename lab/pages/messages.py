"""docs/messages.md: the messages of the code, each with its cure from ``messages.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from lab.pages.markup import MARK, cell, code, table
from lab.pages.texts import Text, texts

CURES = Path(__file__).with_name("messages.toml")

_HEAD = f"""# Messages, and what to do

{MARK}

Look for a few words of the message with the search field of this site, or with your browser's
search on this page. `…` stands for what is filled in: a node, a path, a number. The part before the first
colon is the command that prints the line (`robust-srun:`, `robust-health check:`); lines of the
training's ranks begin with `robust-slurm:`.

| you see | look at |
|---|---|
| `robust-srun: recovered from …` | [what a recovery line says](#the-line-of-a-recovery) |
| an error of the training itself | `robust-status --diagnose LOG…`: [the first cause in logs](diagnosis.md) |
| a drain reason `robust:…` in `sinfo -R` | [drain reasons](admin.md#drain-reasons); `robust-health explain FINDING` |
| `FIX` or `ADVICE` of `robust-admin doctor` | the line below it is the cure |
| an exit code | [exit codes](reference.md#exit-codes) |

## The line of a recovery

```
robust-srun: recovered from node lost on n2 in 2.58 s (detect 1.82, decide 0.00, stop 0.00,
replace 0.26, launch 0.03, first_step 0.47); s1 took the ranks of n2; 1 step lost
```

The cause and the node, the time from the fault to the first step of all ranks, its phases in seconds,
who took the ranks, and the steps that are computed again. Nothing is to be done: the bad node is out
of the job, and reported to the node gate where there is one. `robust-status JOB` keeps all of them.
"""


class Entry(NamedTuple):
    """One cure: the messages that it is for, by parts of their texts or by their channel."""

    group: str
    like: tuple[str, ...]
    channel: str
    cure: str


class Comparison(NamedTuple):
    """The messages of the code beside the cures."""

    messages: list[tuple[Entry, list[Text]]]
    without: list[Text]  # messages of the code that no entry names
    unused: list[str]  # parts of texts, or channels, that are in no message


def compare() -> Comparison:
    """Find the entry of each message: one that names its text, else one for its channel."""
    entries = _entries()
    found: dict[int, list[Text]] = {at: [] for at in range(len(entries))}
    without: list[Text] = []
    used: set[tuple[int, str]] = set()
    for each in texts():
        named = [
            (len(part), number, part)
            for number, entry in enumerate(entries)
            for part in entry.like
            if part in each.text
        ]
        used.update((number, part) for _, number, part in named)
        at = max(named)[1] if named else -1  # the longest part says most
        if at < 0:
            at = next((n for n, e in enumerate(entries) if e.channel == each.channel), -1)
        if at < 0:
            without.append(each)
        else:
            found[at].append(each)
    channels = {each.channel for each in texts()}
    unused = [
        part
        for number, entry in enumerate(entries)
        for part in entry.like
        if (number, part) not in used
    ]
    unused += [e.channel for e in entries if e.channel and e.channel not in channels]
    return Comparison(
        [(entry, found[number]) for number, entry in enumerate(entries)], without, unused
    )


def page() -> str:
    """Return the page."""
    lines, group = [_HEAD], ""
    rows: list[tuple[str, str]] = []
    about = {each["title"]: each.get("about", "") for each in _groups()}
    for entry, messages in compare().messages:
        if entry.group != group:
            lines += _flushed(rows)
            group = entry.group
            lines += [f"## {group}", ""] + ([about[group], ""] if about[group] else [])
        told = "<br>".join(dict.fromkeys(code(each.text) for each in messages))
        if told:
            rows.append((told, cell(entry.cure)))
    lines += _flushed(rows)
    return "\n".join(lines).rstrip("\n") + "\n"


def _flushed(rows: list[tuple[str, str]]) -> list[str]:
    lines = [*table(("message", "what to do"), rows), ""] if rows else []
    rows.clear()
    return lines


def _groups() -> list[dict[str, str]]:
    table: list[dict[str, str]] = tomllib.loads(CURES.read_text(encoding="utf-8"))["group"]
    return table


def _entries() -> list[Entry]:
    read = tomllib.loads(CURES.read_text(encoding="utf-8"))
    return [
        Entry(
            group["title"],
            tuple(message.get("like", ())),
            message.get("channel", ""),
            message["cure"],
        )
        for group in read["group"]
        for message in group["message"]
    ]
