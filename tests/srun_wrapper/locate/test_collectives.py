"""Ranks that are missing in a collective, or differ in it, from torch's flight recorders.

``tests/data/flight_recorder`` has the answers of four real gloo ranks (torch 2.13) of a 2x2 mesh:
rank 3 is stuck outside. NCCL's dumps are made up here, in the format of torch's source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from places import TESTS

from srun_wrapper.agent.looking.recorders import BYTES, parse
from srun_wrapper.locate.collectives import ALL_IN, MISMATCH, MISSING, SHOWN, findings
from srun_wrapper.locate.recorded import Recorded, RecordedCall, RecordedGroup

NOW = 1_795_598_272_600_000_000
DONE = -1.0
REAL = [(TESTS / "data" / "flight_recorder" / f"mesh-{rank}.txt").read_bytes() for rank in range(4)]


def call(
    number: int, waited: float = DONE, name: str = "nccl:all_reduce", items: int = 8
) -> RecordedCall:
    return RecordedCall(number, name, items, str(items), "Float", waited)


def group(*calls: RecordedCall, name: str = "0", last: int = 0) -> RecordedGroup:
    return RecordedGroup(name, "nccl", "dp", last or calls[-1].number, calls)


def of(*groups: RecordedGroup | Sequence[RecordedGroup]) -> list[Recorded]:
    """Ranks from 0 on, each with one group or several."""
    return [
        Recorded(rank, (g,) if isinstance(g, RecordedGroup) else tuple(g))
        for rank, g in enumerate(groups)
    ]


IN_41 = group(call(40), call(41, 2.5))
AT_40 = group(call(40))


@pytest.mark.parametrize(
    ("ranks", "kind", "named", "text"),
    [
        pytest.param(of(IN_41, IN_41, IN_41, AT_40), MISSING, (3,),
                     "rank 3 has not entered all_reduce #41 of group 0 (dp); the other 3 have "
                     "waited in it for 2.5 s", id="one is missing"),
        pytest.param(of(IN_41, AT_40, AT_40), MISSING, (1, 2),
                     "ranks 1-2 have not entered all_reduce #41 of group 0 (dp); rank 0 has waited "
                     "in it for 2.5 s", id="all but one are missing"),
        pytest.param(of(group(call(41, 2.5), call(42, 2.4), last=60), IN_41, AT_40), MISSING, (2,),
                     "rank 2 has not entered all_reduce #41", id="one has queued more"),
        pytest.param(of(IN_41, IN_41), ALL_IN, (),
                     "all 2 ranks are in all_reduce #41 of group 0 (dp) for 2.5 s: none is missing",
                     id="all are in it"),
        pytest.param(of(group(call(41), call(42, 2.0)), IN_41), ALL_IN, (),
                     "rank 1 in all_reduce #41 of group 0 (dp) for 2.5 s, which the others have",
                     id="some have finished it"),
        pytest.param(of(group(call(41, 2.5, items=16)), IN_41, IN_41), MISMATCH, (0,),
                     "rank 0 calls all_reduce of 16 (Float), ranks 1-2 call all_reduce of 8 (Float)"
                     " in collective #41 of group 0 (dp): the program differs by rank (user code)",
                     id="another size"),
        pytest.param(of(group(call(41, items=4), call(42, 2.0)), IN_41, IN_41), MISMATCH, (0,),
                     "rank 0 calls all_reduce of 4", id="another size, and gone through"),
        pytest.param(of(IN_41, group(call(41, 2.5, "nccl:broadcast")), IN_41), MISMATCH, (1,),
                     "rank 1 calls broadcast of 8", id="another operation"),
        pytest.param(of(group(call(41, 2.5, items=16)), IN_41, AT_40, IN_41), MISMATCH, (0,),
                     "rank 0 calls all_reduce of 16", id="unlike and missing: unlike"),
    ],
)  # fmt: skip
def test_one_group(ranks: Sequence[Recorded], kind: str, named: tuple[int, ...], text: str) -> None:
    (found,) = findings(ranks, range(len(ranks)))
    assert (found.kind, found.ranks) == (kind, named)
    assert found.text.startswith(text), found.text


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(of(AT_40, AT_40), id="nothing is unfinished"),
        pytest.param(of(group(call(41, 0.4)), AT_40), id="for a short time"),
        pytest.param(of(group(call(41, 2.5, "nccl:all_to_all", 3))), id="a group of one"),
        pytest.param([], id="no recorder"),
    ],
)
def test_nothing_to_say(ranks: Sequence[Recorded]) -> None:
    assert findings(ranks) == ()


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter", "all_gather", "_new"])
def test_sizes_that_may_differ(name: str) -> None:
    ranks = of(group(call(41, 2.5, name, 3)), group(call(41, 2.5, name, 5)))
    assert [found.kind for found in findings(ranks)] == [ALL_IN]


def test_of_a_rank_that_did_not_answer_nothing_is_said() -> None:
    (found,) = findings(of(IN_41, IN_41), range(3))
    assert found.kind == ALL_IN
    assert found.text.endswith("for 2.5 s; rank 2 did not answer")


def test_a_rank_that_waits_elsewhere_is_a_victim() -> None:
    """Tensor groups 1 (ranks 0, 1) and 2 (ranks 2, 3), data groups 3 (0, 2) and 4 (1, 3)."""
    ranks = [
        Recorded(0, (group(call(7), name="1"), group(call(7, 2.0), name="3"))),
        Recorded(1, (group(call(7), name="1"), group(call(7, 2.0), name="4"))),
        Recorded(2, (group(call(7, 2.0), name="2"), group(call(6), name="3"))),
        Recorded(3, (group(call(6), name="2"), group(call(6), name="4"))),
    ]
    assert [found.ranks for found in findings(ranks)] == [(3,), (3,)]


def test_a_circle_of_waits_is_shown_as_it_is() -> None:
    one, two = group(call(7, 2.0), name="1"), group(call(7, 2.0), name="2")
    ranks = of((one, group(call(6), name="2")), (group(call(6), name="1"), two))
    assert [(found.kind, found.ranks) for found in findings(ranks)] == [
        (MISSING, (0,)),
        (MISSING, (1,)),
    ]


def test_groups_of_one_name_are_not_compared_with_each_other() -> None:
    """Older versions of torch give one name to all groups of a dimension of the mesh."""
    stages = [
        RecordedGroup("1", "nccl", "mesh_dp", 41, (call(40), call(41, 2.5, items=8 * stage)), stage)
        for stage in (1, 1, 2)
    ]
    late = RecordedGroup("1", "nccl", "mesh_dp", 40, (call(40),), 2)
    (found,) = findings(of(*stages, late))
    assert (found.kind, found.ranks, found.waiting) == (MISSING, (3,), (2,))


def test_ten_thousand_ranks_are_few_lines() -> None:
    many = of(*[IN_41 if rank % 2 else AT_40 for rank in range(10_000)])
    (found,) = findings(many, range(10_000))
    assert len(found.text) < 300
    apart = [
        Recorded(rank, tuple(group(call(1, 2.0), name=str(n)) for n in range(9)))
        for rank in range(2)
    ]
    assert len(findings(apart)) == SHOWN


# -- torch's JSON


def test_the_answers_of_real_ranks_of_a_mesh() -> None:
    recorded = [one for text in REAL if (one := parse(text)) is not None]
    assert [one.rank for one in recorded] == [0, 1, 2, 3]
    assert {(g.name, g.description) for g in recorded[0].groups} == {
        ("1", "mesh_dp"),
        ("3", "mesh_tp"),
    }
    texts = [found.text for found in findings(recorded, range(4))]
    assert texts == [
        "rank 3 has not entered all_reduce #3 of group 2 (mesh_dp); rank 1 has waited in it for "
        "4.0 s",
        "rank 3 has not entered all_reduce #3 of group 4 (mesh_tp); rank 2 has waited in it for "
        "4.0 s",
    ]
    assert recorded[0].groups[0].calls[-1].sizes == "4x3"


def entry(number: int, **more: Any) -> dict[str, Any]:
    """Return what FlightRecorder::dump_json of torch 2.5 and later writes for NCCL."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"],
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": "nccl:all_reduce", "time_created_ns": NOW - 3_000_000_000,
        "input_sizes": [[8, 2], [4]], "input_dtypes": ["BFloat16", "BFloat16"],
        "output_sizes": [[8, 2], [4]], "output_dtypes": ["BFloat16", "BFloat16"],
        "state": "completed", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": NOW, "retired": True, "timeout_ms": 600000,
        "is_p2p": False, **more,
    }  # fmt: skip


def answer(*entries: dict[str, Any], rank: int = 0) -> bytes:
    dump = {"version": "2.10", "nccl_version": "2.26.2", "pg_config": {}, "entries": entries}
    head = json.dumps({"rank": rank, "now": NOW})
    return f"{head}\n{json.dumps(dump)}\n{json.dumps({'entries': []})}\n".encode()


def test_the_states_of_nccl() -> None:
    recorded = parse(
        answer(
            *[entry(number) for number in range(1, 20)],
            entry(20, state="started", retired=False),
            entry(21, state="scheduled", retired=False),
            entry(21, is_p2p=True, p2p_seq_id=4, state="scheduled", retired=False),
        )
    )
    assert recorded is not None
    (one,) = recorded.groups
    assert (one.last, [call.number for call in one.calls]) == (21, [17, 18, 19, 20, 21])
    assert [call.waited for call in one.calls] == [-1.0, -1.0, -1.0, 3.0, 3.0]
    assert (one.calls[0].items, one.calls[0].sizes) == (20, "8x2 + 4")


def test_two_backends_of_a_group_count_for_themselves() -> None:
    text = answer(*[entry(n) for n in range(1, 9)], entry(9, state="started", retired=False))
    gloo = [entry(n, profiling_name="gloo:barrier") for n in (1, 2)]
    recorded = parse(text.replace(b'{"entries": []}', json.dumps({"entries": gloo}).encode()))
    assert recorded is not None
    assert [(g.backend, g.last) for g in recorded.groups] == [("nccl", 9), ("gloo", 2)]
    others = [msgspec.structs.replace(recorded, rank=rank) for rank in (1, 2)]
    (found,) = findings([recorded, *others])
    assert found.text.startswith("all 3 ranks are in all_reduce #9 of group 0 (default_pg) for 3.0")


def test_a_group_that_was_made_anew_counts_from_one() -> None:
    recorded = parse(answer(*[entry(n) for n in range(1, 9)], entry(1), entry(2)))
    assert recorded is not None and recorded.groups[0].last == 2


def test_what_a_rank_that_rejoined_left_unfinished_is_over() -> None:
    """The rank's recorder still has the collective, in a group that is seldom used."""
    old = entry(9, state="started", retired=False, process_group=["3", "evaluation"])
    new = entry(1, time_created_ns=NOW - 1_000_000_000)
    text = answer(old, new).replace(b'"now"', b'"since": %d, "now"' % (NOW - 2_000_000_000), 1)
    recorded = parse(text)
    assert recorded is not None and [each.name for each in recorded.groups] == ["0"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"x\n",
        b'{"rank":-1,"now":1}\n',
        b'{"rank":1,"now":1}\n{"entries":[{"state":3}]}',
        b'{"rank":1,"now":1}\n' + b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_none(text: bytes) -> None:
    assert parse(text) is None


def test_an_answer_is_bounded_and_clean() -> None:
    long = {"profiling_name": "nccl:\x1b[2J" + "x" * 999, "process_group": ["9" * 999, "\n" * 99]}
    entries = [
        entry(n, **(long | {"process_group": [f"{g}" * 99, "d" * 999]}), retired=False, state="")
        for g in range(40)
        for n in range(9)
    ]
    recorded = parse(answer(*entries))
    assert recorded is not None and recorded.groups
    assert len(json.dumps(str(recorded))) < 4 * BYTES
    assert "\x1b" not in recorded.groups[0].calls[0].name
