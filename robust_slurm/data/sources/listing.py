"""The list of a source's parts, within its patience: a file system that is away answers nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from robust_slurm.data.errors import SourceStalled
from robust_slurm.data.say import say

if TYPE_CHECKING:
    from robust_slurm.data.sources.base import Source, SourcePart

TURN = 5.0  # s of the patience that are waited at a time: the job may be suspended meanwhile


def list_parts(name: str, source: Source) -> list[SourcePart]:
    """Return the source's parts; a thread that hangs in it is left behind.

    Raises what the source raises, and SourceStalled after its patience without a further file (of
    which ``source.listed`` tells, if there is such a count). A source that is to be waited for, or
    that could be held back in a step, is waited for, with a line on stderr.
    """
    found: list[list[SourcePart]] = []
    failed: list[BaseException] = []

    def find() -> None:
        try:
            found.append(source.parts())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=find, name=f"data {name} files", daemon=True)
    thread.start()
    patience, waited = source.options.patience, 0.0
    listed = getattr(source, "listed", 0)
    while True:
        left = patience
        while left > 0 and thread.is_alive():
            thread.join(min(TURN, left))
            left -= TURN
        if not thread.is_alive():
            break
        before, listed = listed, getattr(source, "listed", 0)
        if listed != before:  # many files take long
            waited = 0.0
            continue
        waited += patience
        text = f"{name}: its files are not listed after {waited:.0f} s"
        if source.options.stalled == "error":
            raise SourceStalled(text)
        say(f"source {text}; still waiting for it")
    if failed:
        raise failed[0]
    return found[0]
