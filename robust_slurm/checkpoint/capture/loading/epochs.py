"""Find out if a script counts its epochs in ``extra``, and goes on in the one that it saved.

A step may be saved after the last batch of a pass. A script that computes its epoch from the step
begins the next pass after a restart. One that saves its epoch goes on in that epoch, and must find
that it has no more batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NAMES = (
    *("epoch", "current_epoch", "cur_epoch", "start_epoch", "epoch_idx", "epoch_index"),
    *("epoch_num", "epoch_number", "epoch_count", "epochs_done", "epochs_completed"),
)


def epoch_counts(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers in encoded values of ``extra`` that count epochs, by path."""
    found: dict[str, int] = {}

    def look(path: str, value: Any) -> None:
        if _counts(path, value):
            found[path] = value
        elif isinstance(value, dict) and isinstance(value.get("d"), dict):
            for name, part in value["d"].items():
                look(f"{path}.{name}", part)

    for key, value in values.items():
        if key.startswith("extra."):
            look(key, value)
    return found


def without_counts(value: Any) -> Any:
    """Return an encoded value without its counts of epochs, to compare it with a later one.

    A script may set them at the end of an epoch or at the beginning of the next: ``goes_on``
    makes both go on at the same batch.
    """
    if isinstance(value, dict) and isinstance(value.get("d"), dict):
        parts = value["d"].items()
        return {"d": {k: without_counts(v) for k, v in parts if not _counts(k, v)}}
    return value


def _counts(name: str, value: Any) -> bool:
    return type(value) is int and name.rpartition(".")[2] in NAMES


def goes_on(
    begun: Mapping[str, int] | None,
    restored: Mapping[str, int],
    read: Callable[[str], bool],
) -> bool:
    """Return True if the script goes on in the epoch that was saved.

    ``begun``: the counts at the first step that was saved in the pass, if there were two;
    ``restored``: those of the step that is resumed; ``read``: whether the script has read one.
    """
    known = {path: count for path, count in restored.items() if read(path)}
    if not known:
        return False
    return begun is None or all(begun.get(path) == count for path, count in known.items())
