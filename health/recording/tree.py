"""The recorded tree on disk: names, encodings, and how a failure is kept.

meta.json      format, context, now, uptime, boot_id, settings, outcomes
files/<path>   the text of every file that was read
calls.json     all other answers, and the errno of what failed
nvml.json  kmsg  history.jsonl  fleet.json
unfinished     while it is recorded; unfinished-28 where something could not be kept, by the errno
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

FORMAT = 1  # of trees written now; one that does not say was built by hand
META = "meta.json"
FILES = "files"
CALLS = "calls.json"
NVML = "nvml.json"
KMSG = "kmsg"
HISTORY = "history.jsonl"
FLEET = "fleet.json"
UNFINISHED = "unfinished"

# Kinds of answers in calls.json: {kind: {key: answer}}.
KINDS = ("read", "names", "link", "entry", "usage", "disk", "probe", "command", "once")


def failure(err: OSError) -> dict[str, Any]:
    """An OSError as it is kept."""
    return {"errno": err.errno or 0, "error": err.strerror or str(err)}


def is_failure(answer: Any) -> bool:
    return isinstance(answer, dict) and "errno" in answer


def raised(answer: dict[str, Any], path: str) -> OSError:
    """The OSError that was kept; its errno makes it the same subclass again."""
    return OSError(int(answer["errno"]), str(answer.get("error", "")), path)


def place(path: str) -> str | None:
    """The place of a file's text below the tree; None for a path that has no safe place there."""
    if not path.startswith("/") or "\0" in path:
        return None
    parts = path.strip("/").split("/")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > 250 for part in parts):
        return None
    return "/".join((FILES, *parts))


def probe_key(path: str, write: bool) -> str:
    return f"{path} write" if write else path


def words_key(words: Sequence[str]) -> str:
    """One string for a command line, or for directories; none of ours has a newline."""
    return "\n".join(words)
