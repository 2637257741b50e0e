"""Load a step of the durable tier, in the training process, as it was saved.

With the same number of ranks on the same mesh, each rank gets back exactly what it saved. With
other replicas of the same pipeline, a rank gets what one of its own stage saved. ``other_shape``
reads all other cases. All data is verified before anything of it is handed out; where to find it is
read from JSON, and records are read with ``weights_only``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from robust_slurm.resizing.shares import holder
from robust_slurm.resizing.stages import is_of, pipelined, ranks_by_stage, replica_of, stage_of
from robust_slurm.text import counted

from ..capture.assembly import OpenedSnapshot
from ..capture.sharing import Share
from ..format.layout import Snapshot
from . import tier
from .dcp.records import read_tensor
from .files import DurableError
from .parts import Part
from .verify import Problem, verify_files

LOADERS = "the positions of the data loaders are not carried over"


class OtherShape(DurableError):
    """The step was saved by another number of ranks, or on another mesh."""


def load(
    directory: str | Path, step: int, rank: int, world: int, mesh: Mapping[str, int]
) -> list[OpenedSnapshot]:
    """This rank's snapshot of ``step``, then those of the other ranks that it needs.

    Raises OtherShape if ``other_shape.read`` is needed, and DurableError if anything that
    would be read is missing or damaged; try an older step then, on all ranks.
    """
    where = tier.step_dir(directory, step)
    manifest = tier.read_manifest(where)
    if (manifest.world, list(manifest.mesh.items())) != (world, list(mesh.items())):
        raise OtherShape(
            f"{where} was saved by {_shape(manifest.world, manifest.mesh)}, this is "
            f"{_shape(world, mesh)}"
        )
    return _verified(where, manifest, tier.read_rank(where, manifest, rank))


def load_of_stage(
    directory: str | Path,
    step: int,
    rank: int,
    world: int,
    mesh: Mapping[str, int],
    shares: Iterable[int],
) -> list[OpenedSnapshot]:
    """Return what a rank can go on with in a step of fewer or more replicas of its pipeline.

    First the snapshot of a rank of its own stage, then those that this needed and those of the
    ranks of the stage that had the ``shares`` of the batch. [] if the step has no such stages, or
    ranks of this one that were not known to hold the same. Raises DurableError as ``load`` does.
    """
    where = tier.step_dir(directory, step)
    manifest = tier.read_manifest(where)
    if not is_of(manifest.mesh, manifest.world):
        return []
    here = ranks_by_stage(pipelined(mesh), world)
    there = ranks_by_stage(pipelined(manifest.mesh), manifest.world)
    if len(here) < 2 or here.keys() != there.keys():
        return []
    alike = there[stage_of(rank, mesh)]
    replica, _ = replica_of(rank, world, mesh)
    first = tier.read_rank(where, manifest, alike[replica % len(alike)])
    if set(first.snapshot.needs) != set(Share(alike).needs(first.snapshot.rank)):
        return []
    held = [alike[holder(share, len(alike))] for share in shares]
    return _verified(where, manifest, first, held)


def _verified(
    where: Path, manifest: tier.Manifest, first: Part, more: Iterable[int] = ()
) -> list[OpenedSnapshot]:
    """Return a snapshot, those that it needs, and those of ``more`` ranks. Raises DurableError."""
    ranks = [r for r in dict.fromkeys((*first.snapshot.needs, *more)) if r != first.snapshot.rank]
    parts = [first, *(tier.read_rank(where, manifest, rank) for rank in ranks)]
    refuse(where, verify_files(where, [file for part in parts for file in part.files]))
    return [OpenedSnapshot(part.snapshot, Tensors(where, part)) for part in parts]


def _shape(world: int, mesh: Mapping[str, int]) -> str:
    dims = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return counted(world, "rank") + (f" ({dims})" if dims else "")


def refuse(where: Path, problems: list[Problem]) -> None:
    """Raise DurableError if there are any problems."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DurableError(f"{where} cannot be loaded: {problems[0].what}{more}")


def notes(snapshot: Snapshot, saved: int, now: int, *, buffers: bool = True) -> list[str]:
    """Return what another number of ranks cannot take over from a snapshot, one line each.

    ``buffers``: those of ranks may have differed."""
    kept = dict(snapshot.values or {})
    shapes = f"saved by {counted(saved, 'rank')}, loaded by {now}"
    found = []
    if "rng" in kept:
        found.append(f"{shapes}: every rank's random number generators start anew")
    if "comm_hooks" in kept:
        found.append(f"{shapes}: the state of the model's communication hooks starts anew")
    modes = kept.get("modes", {}).get("d", {})
    if idle := [name for names in modes.values() for name in names]:
        found.append(
            f"{shapes}: {counted(len(idle), 'module')} in eval() mode, such as "
            f"{idle[0].rstrip('.') or 'the model'}, may be in another one"
        )
    if "loader" in kept:
        found.append(f"{shapes}: {LOADERS}")
    if buffers and any(
        e.kind == "private" and e.fqn.startswith("model.") for e in snapshot.entries
    ):
        found.append(f"{shapes}: buffers of the model are those of rank {snapshot.rank}")
    return found


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of one rank's part, read when they are asked for."""

    def __init__(self, where: Path, part: Part) -> None:
        self._where = where
        self._part = part
        self._at = {
            entry.name: (entry, place)
            for entry, place in zip(part.snapshot.entries, part.places, strict=True)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_tensor(self._where, self._part, *self._at[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
