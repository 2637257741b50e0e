"""Start asyncio tasks that are not collected as garbage while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def start_task(
    tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str | None = None
) -> asyncio.Task[None]:
    """Start ``work``; ``tasks`` holds the task until it ends, as the loop itself does not."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
