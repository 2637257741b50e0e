"""Read a step of the durable tier for another number of ranks, or another mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from robust_slurm.text import counted

from ..capture.any_world import AnyWorld, joined
from ..capture.assembly import Held
from ..capture.sections import TRAINED, kind_of
from ..format.layout import Snapshot
from . import tier
from .dcp.records import read_tensor
from .files import DurableError
from .merge import Merged, Whole, merge
from .parts import File, Outline, Part
from .reader import LOADERS, notes, refuse
from .verify import Problem, verify_files


class SavedStep(NamedTuple):
    """A step, whatever ranks saved it."""

    where: Path
    world: int
    state: AnyWorld
    differing: frozenset[str]
    """Names of tensors of which ranks have saved different contents under one name."""
    unlike: frozenset[str]
    """Keys of ``extra`` under which ranks have saved different values or tensors."""

    def notes(
        self, world: int, taken: Sequence[str], anew: Sequence[str], *, positions: bool
    ) -> list[str]:
        """Return what ``world`` ranks do not have as it was saved, one line each. ``taken``: names
        of tensors of the lowest rank that others had otherwise; ``anew``: keys that are not
        restored; ``positions``: those of loaders are."""
        shapes = f"saved by {counted(self.world, 'rank')}, loaded by {world}"
        found = [
            note
            for note in notes(self.state.own, self.world, world, buffers=False)
            if not (positions and LOADERS in note)
        ]
        if taken:
            found.append(
                f"{shapes}: {_some(taken)} differed between the ranks; all go on with that of rank "
                f"{self.state.own.rank}"
            )
        if others := sorted(self.unlike.difference(anew)):
            found.append(
                f"{shapes}: {_some(others)} differed between the ranks; all go on with that of "
                f"rank {self.state.own.rank}"
            )
        if anew:
            found.append(f"{shapes}: {_some(anew)} differed between the ranks and starts anew")
        return found


def read(directory: str | Path, step: int) -> SavedStep:
    """Open a step, all of which is verified.

    With torch.distributed all ranks of the default group must call it; they share the work.
    Raises DurableError, on all ranks if the checkpoint is damaged.
    """
    where = tier.step_dir(directory, step)
    rank, size = (dist.get_rank(), dist.get_world_size()) if _group() else (0, 1)
    parts: list[Outline] = []
    problems: list[Problem] = []
    other_values: set[str] = set()
    try:
        manifest = tier.read_manifest(where)
        parts = tier.read_outlines(where, manifest)
        files: list[File] = [file for part in parts for file in part.files]
        problems = verify_files(where, files[rank::size])
        lowest = tier.read_rank(where, manifest, 0).snapshot
        for other in range(rank, len(parts), size):
            other_values |= _other_values(lowest, tier.read_rank(where, manifest, other).snapshot)
    except DurableError as err:
        problems = [Problem("", str(err))]
    gathered = _of_all_ranks((problems, other_values))
    refuse(where, [problem for found, _ in gathered for problem in found])
    other_values = {key for _, found in gathered for key in found}
    merged = merge(parts)
    refuse(where, [Problem("", what) for what in merged.problems])
    snapshot, stages = _of_all_stages(lowest, parts, lambda r: tier.read_rank(where, manifest, r))
    blocks = _Blocks(where, parts, merged)
    kinds = (*TRAINED, "extra")
    variants = [e for e in merged.tensors if e.name != e.fqn and kind_of(e.fqn) in kinds]
    mine: set[str] = set()
    try:
        mine = {each.fqn for each in variants[rank::size] if not blocks.same(each)}
    except DurableError as err:
        problems = [Problem("", str(err))]
    every = _of_all_ranks((problems, mine))
    refuse(where, [problem for found, _ in every for problem in found])
    differing = frozenset(name for _, names in every for name in names)
    cut = any(each.kind == "block" for each in merged.tensors)
    state = AnyWorld(snapshot, blocks.held, cut=cut, stages=stages, differing=differing)
    for key in dict(snapshot.values or {}):
        if key.startswith("extra.") and any(f"{n}.".startswith(f"{key}.") for n in differing):
            other_values.add(key)
    return SavedStep(where, len(parts), state, differing, frozenset(other_values))


def _group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _of_all_ranks(value: Any) -> list[Any]:
    found = [value]
    if _group():
        found *= dist.get_world_size()
        dist.all_gather_object(found, value)
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _other_values(one: Snapshot, other: Snapshot) -> set[str]:
    """Return the keys of ``extra`` under which two ranks have saved different values."""
    a, b = (dict(each.values or {}) for each in (one, other))
    return {key for key in a.keys() & b.keys() if key.startswith("extra.") and a[key] != b[key]}


def _of_all_stages(
    lowest: Snapshot, parts: Sequence[Outline], read: Callable[[int], Part]
) -> tuple[Snapshot, bool]:
    """Return the lowest rank's snapshot with models and optimizers of all ranks in its values, and
    True if these have others than the lowest. Raises DurableError, StateError."""
    names, known = set[str](), set[int]()
    values, stages = dict(lowest.values or {}), False
    for part in parts:
        if part.rank in known:
            continue
        alike = [parts[rank] for rank in {part.rank, *part.needs} if rank < len(parts)]
        theirs = {entry.fqn for each in alike for entry in each.form.entries}
        theirs = {name for name in theirs if kind_of(name) in TRAINED}
        known |= {each.rank for each in alike}
        if part.rank != lowest.rank and not theirs <= names:
            for key, other in dict(read(part.rank).snapshot.values or {}).items():
                if kind_of(key) in TRAINED and key in values:
                    values[key], stages = joined(values[key], other), True
        names |= theirs
    return lowest._replace(values=values), stages


class _Blocks:
    """The blocks of all tensors, found by name."""

    def __init__(self, where: Path, parts: Sequence[Outline], merged: Merged) -> None:
        self._where, self._parts = where, parts
        self._whole = {each.fqn: each for each in merged.tensors if each.name == each.fqn}
        self._tensors: dict[int, _Tensors] = {}

    def held(self, fqn: str) -> list[Held]:
        """Return all blocks of a tensor; [] if there is none of this name."""
        whole = self._whole.get(fqn)
        if whole is None:
            return []
        return [(chunk.entry, self._of(chunk.rank)) for chunk in whole.chunks()]

    def same(self, variant: Whole) -> bool:
        """True if another tensor of one name holds the same as the one that has the name: ranks
        that do not share their state each save a counter, for example."""
        first = self._whole.get(variant.fqn)
        if first is None or (first.dtype, first.shape) != (variant.dtype, variant.shape):
            return False
        a, b = (list(each.chunks()) for each in (first, variant))
        if len(a) != 1 or len(b) != 1:
            return False
        one, other = (self._of(c.rank)[c.entry.name].reshape(-1) for (c,) in (a, b))
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    def _of(self, rank: int) -> _Tensors:
        if rank not in self._tensors:
            self._tensors[rank] = _Tensors(self._where, self._parts[rank])
        return self._tensors[rank]


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors of one rank's part, read when they are asked for."""

    def __init__(self, where: Path, part: Outline) -> None:
        self._where, self._part = where, part
        self._at = {entry.name: number for number, entry in enumerate(part.form.entries)}

    def __getitem__(self, name: str) -> torch.Tensor:
        at = self._at[name]
        return read_tensor(self._where, self._part, self._part.entry(at), self._part.place(at))

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
