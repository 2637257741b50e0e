"""The lines of data on stderr: of a rank, of the data process or of a reader."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Print a line at once: a process may be killed at any moment. Raises nothing."""
    with suppress(OSError, ValueError):  # a stderr that is closed: there is nobody to tell
        sys.stderr.write(f"robust-slurm: data: {text}\n")  # at once: threads share the stream
        sys.stderr.flush()
