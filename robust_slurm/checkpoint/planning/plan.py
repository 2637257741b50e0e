"""Find the newest step of which every rank's snapshot has a verified source, to resume. Pure.

A step counts only if each rank of the world has a copy whose digest was verified, all saved in the
same epoch (a node that was cut off may hold a later step of a timeline that was abandoned), and in
the last timeline within it that has the step. Each snapshot is needed on the nodes of the ranks
that name it in their ``needs``. Sources, best first: memory of that node, memory of a peer, a disk
of that node, a disk of another node. A newer step in the durable directory wins over all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..store.events import WITHDRAWN
from ..store.events import Holding as Holding
from .alike import Claim, apart
from .held import Copies as Copies
from .held import Holder as Holder
from .held import Sets, UsableCopy
from .sound import NO_TRUST, Bound, Trust, trusted

SHOWN = 8  # lines of one kind for people; the rest is counted
TIERS = ("memory", "replica")


class Seat(NamedTuple):
    """Store and node on which a rank runs next."""

    store: str
    node: str


class Transfer(NamedTuple):
    """One snapshot that ``target`` fetches."""

    owner: int
    step: int
    source: str
    host: str
    port: int
    target: str
    node: str
    """Node of the target."""
    size: int
    tier: str
    """Tier of the source's copy."""


INCOMPLETE, ELSEWHERE = "its step is incomplete", "its step is taken from elsewhere"
FINE = (INCOMPLETE, ELSEWHERE)
"""Reasons to pass over a copy that has no fault."""


class Passed(NamedTuple):
    """A copy that was not used, and why."""

    store: str
    node: str
    owner: int
    step: int
    file: str
    why: str


class Resume(NamedTuple):
    """The state that every rank starts from."""

    step: int
    tier: str
    """``memory``; ``shared``: the durable directory; empty: there is nothing (step 0)."""
    files: dict[str, dict[int, str]]
    """Node → owner → file that is there."""
    transfers: tuple[Transfer, ...]
    """One for each node and owner."""
    passed: tuple[Passed, ...]
    lines: tuple[str, ...]
    copies: Copies
    """Copies of this step in memory, by owner."""
    doubt: str = ""
    """Note on states left out, or used all the same, because they may hold a NaN."""

    def shards(self, node: str) -> dict[int, str]:
        """Owner → file name in the node's directory, once all transfers to it are done."""
        return self.all_shards().get(node, {})

    def all_shards(self) -> dict[str, dict[int, str]]:
        """``shards`` of every node."""
        found = {node: dict(files) for node, files in self.files.items()}
        for t in self.transfers:
            found.setdefault(t.node, {})[t.owner] = f"fetched-{t.owner}-{t.step}.safetensors"
        return found


def plan(
    places: Sequence[Holder],
    seats: Mapping[int, Seat],
    world: int,
    durable: Iterable[tuple[int, int]] = (),
    failed: Collection[tuple[str, int, int]] = (),
    before: Bound | None = None,
    trust: Trust = NO_TRUST,
    asked: Mapping[int, Sequence[int]] | None = None,
) -> Resume:
    """Choose the step and name each transfer.

    ``durable``: (step, world) of the committed steps. ``failed``: (store, owner, step) of copies
    that turned out to be of no use in this recovery. ``before``, ``trust``: see ``sound``.
    ``asked``: if a world of another size goes on with the step, for each of its ranks the owners
    whose own snapshots it needs. Odd holdings are passed over; ValueError only if a rank of the
    world has no seat.
    """
    if asked is None:
        asked = {rank: (rank,) for rank in range(world)}
    if missing := [rank for rank in asked if rank not in seats]:
        raise ValueError(f"no seat for rank {numbers(missing)} of a world of {world}")
    sets, passed = usable(places, world, failed)
    on_disk = [entry for entry in durable if entry[0] > 0]
    sets, on_disk, doubt = trusted(sets, on_disk, world, trust, before)
    newest, lines = newest_complete(sets, world)
    committed = max(on_disk, default=None)
    files: dict[str, dict[int, str]] = {}
    transfers: list[Transfer] = []
    copies: Copies = {}
    if committed is not None and (newest is None or committed[0] > newest[0]):
        step, saved_by = committed
        told = "" if saved_by == world else f", saved by a world of {saved_by}"
        tier = "shared"
        head = f"resumed step {step} from disk{told}"
    elif newest is not None:
        step, tier, copies = newest[0], "memory", sets[newest]
        files, transfers = _sources(copies, seats, asked)
        head = _summary(step, files, transfers)
    else:
        step, tier = 0, ""
        head = "nothing to resume from"
    for (at, epoch), others in sorted(sets.items(), reverse=True):
        if at > step or (at == step and (at, epoch) != newest):
            why = INCOMPLETE if at > step else ELSEWHERE
            passed += [_passed(copy, why) for found in others.values() for copy in found]
    moved = [f"rank {t.owner}: {t.source} → {t.target} on {t.node} ({t.tier})" for t in transfers]
    skipped = [
        f"passed over: rank {p.owner} step {p.step} on {p.node}: {p.why}"
        for p in passed
        if p.step >= step and not p.why.startswith("its step")
    ]
    shown = (head, *filter(None, [doubt]), *_few(lines), *_few(moved), *_few(skipped))
    return Resume(step, tier, files, tuple(transfers), tuple(passed), shown, copies, doubt)


def late(
    resume: Resume,
    rank: int,
    seat: Seat,
    here: Collection[int],
    failed: Collection[tuple[str, int, int]] = (),
) -> tuple[Transfer, ...]:
    """Transfers for a rank that runs elsewhere than planned; ``here``: owners its node has."""
    found = []
    if rank in resume.copies:
        for owner in sorted({rank, *resume.copies[rank][0].holding.needs}.difference(here)):
            choice = [
                copy
                for copy in resume.copies[owner]
                if (copy.place.store, owner, copy.holding.step) not in failed
            ]
            if not choice:
                continue
            place, held = min(choice, key=lambda c: (c.place.node != seat.node, *_nearness(c)))
            found.append(
                Transfer(
                    owner, held.step, place.store, place.host, place.port,
                    seat.store, seat.node, held.size, held.tier,
                )
            )  # fmt: skip
    return tuple(found)


def usable(
    places: Iterable[Holder], world: int, failed: Collection[tuple[str, int, int]] = ()
) -> tuple[Sets, list[Passed]]:
    """The copies that could be used, by (step, epoch) and owner, and those that could not."""
    places = list(places)
    withdrawn = {
        (held.owner, held.step, held.epoch): held.why
        for place in places
        for held in place.holdings
        if not held.ok and held.why.startswith(WITHDRAWN)
    }
    lines: dict[tuple[int, int], int] = {}
    for held in (held for place in places for held in place.holdings):
        key = held.step, held.epoch
        lines[key] = max(held.line, lines.get(key, 0))
    sets: Sets = {}
    passed: list[Passed] = []
    for place in places:
        for held in place.holdings:
            copy = UsableCopy(place, held)
            if held.line < lines[held.step, held.epoch]:
                passed.append(_passed(copy, "its ranks began anew before this step"))
                continue
            why = withdrawn.get((held.owner, held.step, held.epoch), "")
            if why := why or _fault(held, world, (place.store, held.owner, held.step) in failed):
                passed.append(_passed(copy, why))
            else:
                found = sets.setdefault((held.step, held.epoch), {})
                found.setdefault(held.owner, []).append(copy)
    for copies in sets.values():
        passed += _set_apart(copies)
    return sets, passed


def _set_apart(copies: Copies) -> list[Passed]:
    """Take out the copies of ranks that share a state but do not hold the same."""
    first = {owner: found[0].holding for owner, found in copies.items()}
    passed = []
    for owner in apart({o: Claim(held.needs, held.same) for o, held in first.items()}):
        why = "the ranks that it shares its state with do not hold the same"
        passed += [_passed(copy, why) for copy in copies.pop(owner)]
    return passed


def newest_complete(sets: Sets, world: int) -> tuple[tuple[int, int] | None, list[str]]:
    """The newest (step, epoch) that all ranks have, and a line for people on each newer one."""
    lines: list[str] = []
    for (step, epoch), copies in sorted(sets.items(), reverse=True):
        if len(copies) == world:
            return (step, epoch), lines
        lacking = [rank for rank in range(world) if rank not in copies]
        lines.append(f"step {step} is incomplete: nothing usable of rank {numbers(lacking)}")
    return None, lines


def _fault(held: Holding, world: int, failed: bool) -> str:
    """Reason why a copy cannot be used; empty if it can."""
    if not held.ok:
        return held.why or "not verified"
    if held.world != world:
        return f"saved by a world of {held.world}, this one has {world}"
    if not 0 <= held.owner < world or held.step < 0 or held.tier not in TIERS:
        return f"odd: rank {held.owner} step {held.step} in {held.tier!r}"
    if strange := [rank for rank in held.needs if not 0 <= rank < world]:
        return f"odd: it needs rank {numbers(strange)} of a world of {world}"
    return "it could not be used a moment ago" if failed else ""


def _sources(
    copies: Copies, seats: Mapping[int, Seat], asked: Mapping[int, Sequence[int]]
) -> tuple[dict[str, dict[int, str]], list[Transfer]]:
    """Choose for each node the source of each snapshot that its ranks need."""
    wanted: dict[tuple[str, int], list[str]] = {}  # (node, owner) → stores that need it
    for rank, own in sorted(asked.items()):
        seat = seats[rank]
        for owner in {*own, *copies[own[0]][0].holding.needs}:
            wanted.setdefault((seat.node, owner), []).append(seat.store)
    files: dict[str, dict[int, str]] = {}
    remote: list[tuple[str, int, list[UsableCopy]]] = []
    for (node, owner), stores in sorted(wanted.items()):
        here = [c for c in copies[owner] if c.place.node == node]
        if here:
            best = min(here, key=lambda c: _nearness(c, stores))
            files.setdefault(node, {})[owner] = best.holding.file
        else:
            remote.append((node, owner, list(copies[owner])))
    # Those with the least choice first; then each from whoever sends the least so far.
    remote.sort(key=lambda item: len(item[2]))
    sent: Counter[str] = Counter()  # bytes, by store and by node
    received: Counter[str] = Counter()
    transfers = []
    for node, owner, choice in remote:
        place, held = min(
            choice, key=lambda c: (sent["node " + c.place.node], sent[c.place.store], *_nearness(c))
        )
        target = min(wanted[node, owner], key=lambda s: (received[s], s))
        sent["node " + place.node] += held.size
        sent[place.store] += held.size
        received[target] += held.size
        at = place.host, place.port
        transfers.append(
            Transfer(owner, held.step, place.store, *at, target, node, held.size, held.tier)
        )
    return files, transfers


def _nearness(copy: UsableCopy, stores: Collection[str] = ()) -> tuple[object, ...]:
    """Sort key of copies on one node: own ones first (they outlive fetched ones); then by name."""
    place, held = copy
    own = held.file.startswith("own-")
    return held.tier, not own, place.store not in stores, place.store, held.file


def _passed(copy: UsableCopy, why: str) -> Passed:
    place, held = copy
    return Passed(place.store, place.node, held.owner, held.step, held.file, why)


def _summary(step: int, files: dict[str, dict[int, str]], transfers: Sequence[Transfer]) -> str:
    there = sum(len(found) for found in files.values())
    text = f"resumed step {step} from memory: {there} of {there + len(transfers)} snapshots"
    text += " were where they are needed"
    total = sum(t.size for t in transfers) / 2**20
    return text + (f", {len(transfers)} from peers ({total:.0f} MiB)" if transfers else "")


def _few(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"… and {rest} more"] if rest > 0 else [])]


def numbers(values: Iterable[int]) -> str:
    """Ranks as people write them: ``0-3,7``."""
    parts: list[list[int]] = []
    for value in sorted(set(values)):
        if parts and parts[-1][1] == value - 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
