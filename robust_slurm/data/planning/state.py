"""The state of a plan between two steps, from which all later steps follow (pure).

It is a part of every checkpoint, so it is small, and can be saved as plain values. These may come
from a file that anybody has written, so they are checked when they are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from robust_slurm.data.errors import DataError
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta, Ref

VERSION = 2
MOST_CARRIED = 1_000_000


class SourceState(NamedTuple):
    """The place in one source."""

    lanes: tuple[Position, ...]
    """Each lane's position, after the last sample that was drawn."""
    epoch: int = 0
    """The pass over the source that samples are drawn of; a lane that is ahead waits."""
    turn: int = 0
    """The lane that the next sample is drawn from, if it is not ahead."""
    credit: int = 0
    """See ``planning.mix``."""
    drawn: int = 0
    """Samples so far."""


class PlanState(NamedTuple):
    """The state after ``step`` steps."""

    step: int
    sources: dict[str, SourceState]
    carried: tuple[Meta, ...] = ()
    """Samples that were drawn and found no place yet, oldest first. One of more tokens than a row
    is that many whole rows of a document, from its ``piece`` on."""


def first_state(lanes: dict[str, int]) -> PlanState:
    """Return the state before step 0. ``lanes``: number of lanes of each source."""
    return PlanState(0, {name: SourceState((Position(),) * n) for name, n in lanes.items()})


def to_plain(state: PlanState, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return the state as JSON values. ``fingerprint``: plain values that tell this plan from
    others: a state of another one is refused."""
    names = sorted(state.sources)
    return {
        "version": VERSION,
        "plan": fingerprint,
        "step": state.step,
        "sources": {
            name: {
                "lanes": [list(position) for position in each.lanes],
                "epoch": each.epoch,
                "turn": each.turn,
                "credit": each.credit,
                "drawn": each.drawn,
            }
            for name, each in state.sources.items()
        },
        "carried": [
            [names.index(meta.ref.source), *meta.ref[1:], meta.tokens] for meta in state.carried
        ],
    }


def from_plain(plain: Any, fingerprint: dict[str, Any], lanes: dict[str, int]) -> PlanState:
    """Return the state that ``to_plain`` has returned as plain values. Raises DataError that says
    what is wrong, or which part of the plan differs."""
    if not isinstance(plain, dict) or "version" not in plain:
        raise DataError("the saved state is not one of robust_slurm.data")
    if plain["version"] != VERSION:
        raise DataError(f"the saved state has version {plain['version']!r}, known is {VERSION}")
    if differs := difference(plain.get("plan"), fingerprint):
        raise DataError(
            f"the saved state is of another plan: {differs}. Go on with the plan that it was saved "
            "with, or begin anew without it"
        )
    saved = plain.get("sources")
    if not isinstance(saved, dict) or set(saved) != set(lanes):
        raise DataError("the saved state is damaged: it does not name the plan's sources")
    sources = {name: _source(name, saved[name], number) for name, number in lanes.items()}
    carried = plain.get("carried")
    if not isinstance(carried, list) or len(carried) > MOST_CARRIED:
        raise DataError("the saved state is damaged: carried is no list of samples")
    names = sorted(lanes)
    waiting = tuple(_carried(each, names, lanes) for each in carried)
    pack = fingerprint.get("pack", 0)
    if pack and any(meta.tokens > pack and meta.tokens % pack for meta in waiting):
        raise DataError("the saved state is damaged: carried: a piece is no whole number of rows")
    return PlanState(_natural(plain.get("step"), "step"), sources, waiting)


def difference(
    saved: Any,
    own: dict[str, Any],
    where: str = "",
    names: tuple[str, str] = ("in the state", "here"),
) -> str:
    """Return the first thing that differs, by its name and both values; "" if none does.
    ``names``: of the two sides."""
    if not isinstance(saved, dict):
        return f"{where or 'plan'} is {saved!r} in it"
    for name in [*own, *(name for name in saved if name not in own)]:
        path = f"{where}.{name}" if where else str(name)
        if name not in saved or name not in own:
            return f"{path} is {f'only {names[0]}' if name in saved else f'not {names[0]}'}"
        if isinstance(own[name], dict):
            if found := difference(saved[name], own[name], path, names):
                return found
        elif type(saved[name]) is not type(own[name]) or saved[name] != own[name]:
            return f"{path} is {str(saved[name])[:80]!r} {names[0]} and {own[name]!r} {names[1]}"
    return ""


def _source(name: str, saved: Any, lanes: int) -> SourceState:
    where = f"source {name}"
    if not isinstance(saved, dict) or not isinstance(saved.get("lanes"), list):
        raise DataError(f"the saved state is damaged: {where} has no lanes")
    positions = saved["lanes"]
    if len(positions) != lanes:
        raise DataError(f"the saved state is damaged: {where} has {len(positions)} lanes")
    turn = _natural(saved.get("turn"), f"{where}: turn")
    credit = saved.get("credit")
    if turn >= lanes or type(credit) is not int:
        raise DataError(f"the saved state is damaged: {where}: turn or credit")
    return SourceState(
        tuple(Position(*_naturals(each, 3, where)) for each in positions),
        _natural(saved.get("epoch"), f"{where}: epoch"),
        turn,
        credit,
        _natural(saved.get("drawn"), f"{where}: drawn"),
    )


def _carried(saved: Any, names: list[str], lanes: dict[str, int]) -> Meta:
    source, lane, epoch, part, record, piece, tokens = _naturals(saved, 7, "carried")
    if source >= len(names) or lane >= lanes[names[source]]:
        raise DataError("the saved state is damaged: carried: no such source or lane")
    return Meta(Ref(names[source], lane, epoch, part, record, piece), tokens)


def _naturals(found: Any, count: int, where: str) -> list[int]:
    if not isinstance(found, (list, tuple)) or len(found) != count:
        raise DataError(f"the saved state is damaged: {where}: {str(found)[:80]}")
    return [_natural(each, where) for each in found]


def _natural(found: Any, where: str) -> int:
    if type(found) is not int or not 0 <= found < 1 << 62:
        raise DataError(f"the saved state is damaged: {where}: {str(found)[:80]!r}")
    return found
