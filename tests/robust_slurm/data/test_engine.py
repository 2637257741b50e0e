"""Steps are the same from any state, for any shares and any number of ranks, and whole."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from memory_source import MemoryFeed, MemorySource, corpus, memory_feeds

from robust_slurm.data.construct import construct
from robust_slurm.data.engine import Engine, StepData
from robust_slurm.data.errors import DataError, EndOfData, SourceStalled
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.loader import open_steps
from robust_slurm.data.plan import Plan
from robust_slurm.data.planning.state import PlanState, first_state, from_plain, to_plain
from robust_slurm.data.sample import Meta, Ref, Sample
from robust_slurm.data.sources.base import SourceOptions
from robust_slurm.data.sources.records import records
from robust_slurm.data.steps import LocalSteps
from robust_slurm.resizing.world import TrainingWorld

PACK = 512


def a_plan(**other: Any) -> Plan:
    given: dict[str, Any] = {
        "sources": {"web": corpus("web", 1), "code": corpus("code", 2, mean=6.0, lanes=3)},
        "mix": lambda step: {"web": 0.8, "code": 0.2} if step < 10 else {"web": 1, "code": 1},
        "cost": lambda meta: meta.tokens**2,
        "pack": PACK, "mesh": {"dp": 4}, "batch": 2, "seed": 7,
    }  # fmt: skip
    return Plan(**{**given, **other})


def engine_of(plan: Plan, shares: Iterable[int] = range(4), dp: int = 4, **other: Any) -> Engine:
    engine = Engine(plan, memory_feeds(plan), list(shares), dp, **other)
    engine.seek(first_state(plan.lanes()))
    return engine


def steps(
    plan: Plan, count: int, shares: Iterable[int], dp: int = 4, state: PlanState | None = None
) -> list[StepData]:
    engine = Engine(plan, memory_feeds(plan), list(shares), dp)
    engine.seek(state or first_state(plan.lanes()))
    found = [engine.next() for _ in range(count)]
    engine.close()
    return found


def all_of(plan: Plan, dp: int = 4) -> list[StepData]:
    engine, found = engine_of(plan, range(dp), dp), []
    with pytest.raises(EndOfData):
        while True:
            found.append(engine.next())
    return found


def digest(rows: dict[str, Any]) -> str:
    made = hashlib.sha256()
    for name, array in rows.items():
        assert array.flags.c_contiguous
        made.update(f"{name} {array.dtype} {array.shape}".encode())
        made.update(array.tobytes())
    return made.hexdigest()


def test_every_share_is_the_same_whoever_computes_it_and_from_any_state() -> None:
    """100 kills at any step, each resumed from a state before it, by another number of ranks."""
    plan = a_plan()
    whole = steps(plan, 30, range(4))
    hashes = [{share: digest(rows) for share, rows in step.rows.items()} for step in whole]
    assert any(step.state.carried for step in whole)
    draw = random.Random(3)
    for _ in range(100):
        saved = draw.randrange(29)
        plain = json.loads(json.dumps(to_plain(whole[saved].state, plan.fingerprint())))
        state = from_plain(plain, plan.fingerprint(), plan.lanes())
        assert state == whole[saved].state
        ranks = draw.randrange(1, 5)
        shares = plan.shares(draw.randrange(ranks), ranks, 4)
        for step in steps(plan, min(3, 29 - saved), shares, state=state):
            assert {s: digest(rows) for s, rows in step.rows.items()} == {
                share: hashes[step.number][share] for share in shares
            }


def test_packed_rows_have_every_token_of_a_pass_once_in_its_place() -> None:
    plan = a_plan(epochs=1, mix={"web": 1, "code": 1}, pad={"tokens": -7})
    tokens = Counter[int]()
    for step in all_of(plan):
        for rows in step.rows.values():
            used = rows["document_ids"] >= 0
            assert rows["tokens"].shape == rows["position_ids"].shape == (2, PACK)
            assert (rows["tokens"][~used] == -7).all() and not rows["position_ids"][~used].any()
            tokens.update(rows["tokens"][used].tolist())
            bounds = rows["cu_seqlens"]
            assert (bounds[0], bounds[-1]) == (0, 2 * PACK) and (np.diff(bounds) > 0).all()
            flat, places = rows["tokens"].reshape(-1), rows["position_ids"].reshape(-1)
            ids = rows["document_ids"].reshape(-1)
            for begin, end in pairwise(bounds):
                assert len(set(ids[begin:end])) == 1
                if ids[begin] >= 0:  # a document's tokens count up, as do their positions
                    assert set(np.diff(flat[begin:end])) <= {1} >= set(np.diff(places[begin:end]))
    there = Counter[int]()
    for source in plan.sources.values():
        assert isinstance(source, MemorySource)
        for part, lengths in enumerate(source.lengths):
            for record in range(len(lengths)):
                there.update(source.values(part, record)["tokens"].tolist())
    missing = there - tokens
    assert not tokens - there and sum(missing.values()) < 4 * PACK  # the end, too little for all


def test_feeds_keep_nothing_but_what_is_carried_and_read_ahead() -> None:
    plan = a_plan(sources={"web": corpus("web", 4, mean=6.5)}, mix=None)
    feeds = memory_feeds(plan)
    engine = Engine(plan, feeds, [1], 4)
    engine.seek(first_state(plan.lanes()))
    for _ in range(50):
        step = engine.next()
        carried = {meta.ref._replace(piece=0) for meta in step.state.carried}
        held = {ref for feed in feeds.values() for ref in feed.held}
        assert len(held - carried) <= len(feeds)
    engine.close()
    assert all(feed.closed for feed in feeds.values())


def test_rows_are_written_where_the_caller_says() -> None:
    plan, made = a_plan(), {}

    def allocate(share: int, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        made[share, name] = np.full(shape, 99, dtype)
        return made[share, name]

    engine = engine_of(plan, [0, 2])
    engine.next()
    engine.seek(first_state(plan.lanes()))
    step = engine.next(allocate)
    assert sorted(made) == sorted((s, name) for s, rows in step.rows.items() for name in rows)
    assert all(rows[name] is made[s, name] for s, rows in step.rows.items() for name in rows)
    assert {s: digest(rows) for s, rows in step.rows.items()} == {
        s: digest(rows) for s, rows in steps(plan, 1, [0, 2])[0].rows.items()
    }


def test_without_pack_rows_are_padded_or_collated() -> None:
    plan = a_plan(pack=None, epochs=1, mix=None)
    rows = steps(plan, 1, [3])[0].rows[3]
    assert rows["lengths"].shape == (2,) and rows["tokens"].shape == (2, max(rows["lengths"]))
    for row, length in zip(rows["tokens"], rows["lengths"], strict=True):
        assert set(np.diff(row[:length])) <= {1} and not row[length:].any()
    assert len(all_of(plan)) == 400 // 8
    plan = a_plan(
        pack=None, mix=None, collate=lambda samples: {"n": [len(s["tokens"]) for s in samples]}
    )
    made = steps(plan, 1, [3])[0].rows[3]
    assert made["n"].tolist() == rows["lengths"].tolist()


class Odd(MemorySource):
    """A source of odd values."""

    def __init__(self, *values: dict[str, Any]) -> None:
        super().__init__("odd", [[3] * len(values)], 1)
        self.odd = values

    def values(self, part: int, record: int) -> dict[str, Any]:
        return {**super().values(part, record), **self.odd[record]}


@pytest.mark.parametrize(
    ("pack", "values", "why"),
    [
        (6, [{}, {"more": np.zeros(3)}], "needs? arrays of the same names|have tokens"),
        (6, [{"more": np.zeros((3, 2))}], "'more' is no array of one dimension"),
        (6, [{"more": 7}], "'more' is no array of one dimension"),
        (6, [{"more": np.zeros(4)}], "'more' is no array of one dimension and of 3 tokens"),
        (6, [{"tokens": np.zeros(4)}, {}], "has 4 tokens now, and had another"),
        (6, [{"position_ids": np.zeros(3)}], "samples have an array 'position_ids'"),
        (None, [{}, {"more": 1}], "odd: part 0, record . has "),
        (None, [{"text": object()}], "'text' is not an array of numbers"),
        (None, [{"a": np.zeros((2, 2))}, {"a": np.zeros((3, 3))}], "differs in shape"),
    ],
)
def test_samples_that_do_not_go_together(pack: int | None, values: Any, why: str) -> None:
    plan = Plan(sources={"odd": Odd(*values)}, pack=pack, batch=len(values), fill=1)
    with pytest.raises(DataError, match=why):
        steps(plan, 1, [0], 1)


class Stalling(MemoryFeed):
    """A feed that gives nothing for a while."""

    stalls = takes = 0

    def next(self) -> tuple[Meta, Position]:
        if Stalling.stalls and self.name == "web":
            Stalling.stalls -= 1
            raise SourceStalled("nothing for 300 s")
        return super().next()

    def take(self, refs: Iterable[Ref]) -> list[Sample]:
        if Stalling.takes and self.name == "web":
            Stalling.takes -= 1
            raise SourceStalled("nothing for 300 s")
        return super().take(refs)


@pytest.mark.parametrize(
    ("policy", "alone"),
    [("wait", True), ("error", True), ("hold back", True), ("hold back", False)],
)
def test_a_source_that_stalls(policy: str, alone: bool) -> None:
    plan = a_plan(mix={"web": 1, "code": 1})
    for source in plan.sources.values():
        assert isinstance(source, MemorySource)
        source.options = SourceOptions(lanes=2, window=1, stalled=policy)
    undisturbed = steps(plan, 30, range(4))
    said: list[str] = []
    engine = Engine(plan, {k: Stalling(plan, *k) for k in memory_feeds(plan)}, range(4), 4,
                    said.append, alone=alone)  # fmt: skip
    engine.seek(first_state(plan.lanes()))
    assert engine.next().state == undisturbed[0].state
    Stalling.stalls = 2
    waits = policy == "wait" or not alone
    Stalling.takes = 2 if waits else 0
    later = []
    for _ in range(29):
        if policy == "error":  # each time: in some steps it is the first source, in others not
            Stalling.stalls = 1
            with pytest.raises(SourceStalled):
                engine.next()
        later.append(engine.next())
    if waits or policy == "error":
        assert [digest(s.rows[0]) for s in later] == [digest(s.rows[0]) for s in undisturbed[1:]]
        assert len(said) == (4 if waits else 0)
        assert all(("several ranks" in line) is not alone for line in said)
        return
    assert "the step goes on without it" in said[0]
    sources = [Counter(each.drawn for each in step.state.sources.values()) for step in later]
    assert sources
    web, code = (later[-1].state.sources[name].credit for name in ("web", "code"))
    assert abs(web) + abs(code) < 2 * 4096 << 30  # it has given what it had to give since
    assert len(said) == 1 and Stalling.stalls == 1, "it is not asked again, and waited for, at once"
    Stalling.stalls = 0


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_holds_a_source_back_that_another_may_not(
    size: int,
) -> None:
    plan = a_plan(mesh={"dp": 1, "tp": size})
    for source in plan.sources.values():
        assert isinstance(source, MemorySource)
        source.options = SourceOptions(stalled="hold back")
    made, shares = open_steps(plan, TrainingWorld(0, size, size))
    assert isinstance(made, LocalSteps) and shares == (0,)
    engine = made._engine
    assert engine._may_hold_back("web") is (size == 1)
    engine.close()


def test_samples_whose_length_nobody_can_say_are_not_packed_by_their_first_token() -> None:
    meta = Meta(Ref("odd", 0, 0, 0, 0), 1)
    values = {"ids": np.zeros(3, np.int32), "label": np.zeros(1, np.int32)}
    with pytest.raises(DataError, match="'ids' is no array of one dimension and of 1 tokens"):
        construct(a_plan(), ((meta,),), {meta.ref: Sample(meta, values)})


def test_a_single_sample_of_another_byte_order_is_of_ours_in_its_row() -> None:
    meta = Meta(Ref("odd", 0, 0, 0, 0), 3)
    sample = Sample(meta, {"tokens": np.arange(3, dtype=">i4")})
    made = construct(a_plan(), ((meta,),), {meta.ref: sample})
    assert made["tokens"].dtype == np.dtype(np.int32)  # torch takes no other
    assert made["tokens"][0, :3].tolist() == [0, 1, 2]


class Small(MemorySource):
    """A source of uint16."""

    def values(self, part: int, record: int) -> dict[str, Any]:
        return {"tokens": super().values(part, record)["tokens"].astype(np.uint16)}


@pytest.mark.parametrize(
    ("pad", "why"),
    [
        ({"token": 1}, "pad: 'token' is none of the arrays .tokens"),
        ({"tokens": -100}, "pad: -100 does not fit into 'tokens', an array of uint16"),
        ({"tokens": 0.5}, "pad: 0.5 does not fit"),
    ],
)
@pytest.mark.parametrize("pack", [6, None])
def test_a_pad_that_would_be_lost(pad: dict[str, float], why: str, pack: int | None) -> None:
    plan = Plan(sources={"s": Small("s", [[3, 2]], 1)}, pack=pack, batch=2, fill=0.5, pad=pad)
    with pytest.raises(DataError, match=why):
        steps(plan, 1, [0], 1)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"sources": {}}, "sources is empty"),
        ({"sources": ["web"]}, "sources is .'web'.; give a dict"),
        ({"sources": {"web": "web/*.jsonl"}}, "source web is 'web/.*robust_slurm.data.jsonl"),
        ({"mix": {"wbe": 1}}, "Plan: mix: 'wbe' is none of the sources .code, web."),
        ({"mix": 3}, "mix is 3; give a dict"),
        ({"cost": 3}, "cost is 3; give a function"),
        ({"pack": 0}, "pack is 0; give a whole number >= 1"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"epochs": True}, "epochs is True"),
        ({"seed": -1}, "seed is -1"),
        ({"long": "cut"}, "long is 'cut'; it is one of split, truncate, error"),
        ({"fill": 2}, "fill is 2"),
        ({"collate": dict}, "collate is for batches without pack"),
        ({"mesh": {"pp": 2}}, "none of pp is data-parallel"),
    ],
)
def test_wrong_plans(other: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        a_plan(**other)


def test_a_state_of_other_sources_is_refused_and_one_of_another_batch_is_not() -> None:
    plan = a_plan()
    state = to_plain(steps(plan, 3, [0])[-1].state, plan.fingerprint())
    other = a_plan(batch=1, mesh={"dp": 8}, mix={"code": 1}, cost=None)
    begun = from_plain(state, other.fingerprint(), other.lanes())
    assert steps(other, 1, [7], 8, begun)[0].number == 3
    for changed, why in (
        ({"seed": 8}, "seed is '7' in the state and 8 here"),
        ({"pack": 256}, "pack is '512'"),
        ({"sources": {"web": corpus("web", 1)}}, "sources.code is only in the state"),
        ({"sources": {"web": corpus("web", 1), "code": corpus("code", 2)}}, "sources.code.lanes"),
    ):
        other = a_plan(**{"mix": None, **changed})
        with pytest.raises(DataError, match=why):
            from_plain(state, other.fingerprint(), other.lanes())


def test_tensors_are_packed_and_padded_as_arrays_are() -> None:
    rows = [
        {"tokens": torch.arange(n + 1), "x": torch.ones(n + 1, requires_grad=True)}
        for n in range(4)
    ]
    for other in ({"pack": 16, "mesh": {"dp": 2}}, {"pack": None, "mesh": {"dp": 2}}):
        plan = a_plan(sources={"a": records(rows, lambda row: row)}, mix=None, epochs=1, **other)
        made = LocalSteps(plan, range(2), plan.ranks(2).data)
        made.seek(None)
        arrays = list(made.next()[1].values())
        assert {a["tokens"].dtype.name + a["x"].dtype.name for a in arrays} == {"int64float32"}
        assert sum(a["tokens"].sum() for a in arrays) == 0 + 1 + 3 + 6
        made.close()
    half = [{"tokens": torch.ones(2, dtype=torch.bfloat16)}]
    made = LocalSteps(a_plan(sources={"a": records(half, dict)}, mix=None), [0], 4)
    made.seek(None)
    with pytest.raises(DataError, match=r"record 0: a value cannot become an array: .*BFloat16"):
        made.next()
    made.close()
