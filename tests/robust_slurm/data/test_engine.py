"""Steps are the same from any state, for any shares and any number of ranks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
from memory_source import corpus, memory_feeds

from robust_slurm.data.engine import Engine, Step
from robust_slurm.data.plan import Plan
from robust_slurm.data.planning.state import PlanState, first_state, from_plain, to_plain

PACK = 512


def a_plan(**other: Any) -> Plan:
    given: dict[str, Any] = {
        "sources": {"web": corpus("web", 1), "code": corpus("code", 2, mean=6.0, lanes=3)},
        "mix": lambda step: {"web": 0.8, "code": 0.2} if step < 10 else {"web": 1, "code": 1},
        "cost": lambda meta: meta.tokens**2,
        "pack": PACK, "mesh": {"dp": 4}, "batch": 2, "seed": 7,
    }  # fmt: skip
    return Plan(**{**given, **other})


def steps(
    plan: Plan, count: int, shares: Iterable[int], dp: int = 4, state: PlanState | None = None
) -> list[Step]:
    engine = Engine(plan, memory_feeds(plan), list(shares), dp)
    engine.seek(state or first_state(plan.lanes()))
    found = [engine.next() for _ in range(count)]
    engine.close()
    return found


def digest(rows: dict[str, np.ndarray[Any, Any]]) -> str:
    made = hashlib.sha256()
    for name, array in rows.items():
        made.update(f"{name} {array.dtype} {array.shape}".encode())
        made.update(array.tobytes())
    return made.hexdigest()


def test_every_share_is_the_same_whoever_computes_it_and_from_any_state() -> None:
    plan = a_plan()
    whole = steps(plan, 30, range(4))
    hashes = [{share: digest(rows) for share, rows in step.rows.items()} for step in whole]
    draw = random.Random(3)
    for _ in range(100):  # a kill at any step, a resume from a state before it, by other ranks
        saved = draw.randrange(29)
        plain = json.loads(json.dumps(to_plain(whole[saved].state, plan.fingerprint())))
        state = from_plain(plain, plan.fingerprint(), plan.lanes())
        assert state == whole[saved].state
        ranks = draw.randrange(1, 5)
        rank = draw.randrange(ranks)
        shares = plan.shares(rank, ranks, 4)
        for step in steps(plan, min(3, 29 - saved), shares, state=state):
            assert {s: digest(rows) for s, rows in step.rows.items()} == {
                share: hashes[step.number][share] for share in shares
            }
