"""A whole run of active tests over a fake fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fake_test_worker import Answer, fleet

from health.active.coordinator import procedure
from health.active.coordinator.procedure import WantedTests
from health.active.judging.fleet import NO_BASELINES, Baselines
from health.active_tests import TESTS, Judged

ALL = tuple(test.name for test in TESTS)


def judged_of(
    answers: Mapping[str, Answer],
    tests: tuple[str, ...] = ALL,
    limit: float = 60.0,
    *,
    slots: int = 1,
    ready: Mapping[str, Any] = {},
    baselines: Baselines = NO_BASELINES,
    said: Callable[[str], None] = lambda line: None,
    **wanted: Any,
) -> Judged:
    async def body() -> Judged:
        async with fleet(answers, slots=slots, **ready) as session:
            want = WantedTests(tests, "quick", limit, **wanted)
            return await procedure.run(session, list(answers), want, baselines=baselines, said=said)

    return asyncio.run(body())
