"""Loading a step of the durable tier, in the training process.

The same number of ranks on the same mesh: each rank gets back exactly what it saved (``load``).
Any other: parameters and optimizer state through torch's DCP, which cuts them anew
(``load_resharded``). All data is verified before anything of it is handed out; where to find it is
read from JSON, and records are read with ``weights_only``.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from . import durable
from .dcp_metadata import build, with_storage
from .durable_files import DurableError
from .durable_merge import merge
from .durable_parts import File, Part
from .durable_verify import Problem, verify_files
from .layout import Snapshot
from .records import loads, read_tensor


class OtherShape(DurableError):
    """The step was saved by another number of ranks, or on another mesh."""


class Loaded(NamedTuple):
    """One rank's snapshot; takes the place of ``state.Source``."""

    snapshot: Snapshot
    tensors: Mapping[str, torch.Tensor]
    """By the entry's name. Each is read from the disk anew when it is asked for."""


class Carried(NamedTuple):
    """What came along beside the resharded state."""

    values: Any
    """The values of the lowest rank, as in ``Snapshot.values``."""
    notes: list[str]
    """What could not be carried over, one line each."""
    first: Loaded
    """All of the lowest rank."""


def load(
    directory: str | Path, step: int, rank: int, world: int, mesh: Mapping[str, int]
) -> list[Loaded]:
    """This rank's snapshot of ``step``, then those of the other ranks that it needs.

    Raises OtherShape if ``load_resharded`` is needed, and DurableError if anything that would be
    read is missing or damaged; try an older step then, on all ranks.
    """
    where = durable.step_dir(directory, step)
    manifest = durable.read_manifest(where)
    if (manifest.world, list(manifest.mesh.items())) != (world, list(mesh.items())):
        raise OtherShape(
            f"{where} was saved by {_shape(manifest.world, manifest.mesh)}, this is "
            f"{_shape(world, mesh)}"
        )
    own = durable.read_rank(where, manifest, rank)
    others = [r for r in own.snapshot.needs if r != rank]
    parts = [own, *(durable.read_rank(where, manifest, other) for other in others)]
    _refuse(where, verify_files(where, [file for part in parts for file in part.files]))
    return [Loaded(part.snapshot, _Tensors(where, part)) for part in parts]


def load_resharded(directory: str | Path, step: int, state: dict[str, Any]) -> Carried:
    """Fill ``state``, as ``dcp.load`` takes it, from ``step``, whatever ranks saved it.

    With torch.distributed all ranks of the default group must call it; they share the work of
    verifying. Raises DurableError (on all ranks, if the checkpoint is damaged) before ``state``
    changes, or when the checkpoint lacks something that ``state`` asks for.
    """
    where = durable.step_dir(directory, step)
    group = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    parts: list[Part] = []
    problems: list[Problem] = []
    try:
        manifest = durable.read_manifest(where)
        parts = [durable.read_rank(where, manifest, r) for r in range(manifest.world)]
        files: list[File] = [file for part in parts for file in part.files]
        problems = verify_files(where, files[rank::world])
    except DurableError as err:
        problems = [Problem("", str(err))]
    if group:
        gathered: list[list[Problem]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, problems)
        problems = [problem for found in gathered for problem in found]
    _refuse(where, problems)
    merged = merge(parts)
    _refuse(where, [Problem("", what) for what in merged.problems])
    metadata = with_storage(*build(merged, parts))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(
                state,
                storage_reader=_Reader(where, metadata),
                planner=_Planner(),
                no_dist=not group,
            )
    except (CheckpointException, RuntimeError, ValueError, OSError) as err:
        raise DurableError(f"{where} does not fit what is to be loaded: {_cause(err)}") from err
    first = Loaded(parts[0].snapshot, _Tensors(where, parts[0]))
    return Carried(first.snapshot.values, _notes(first.snapshot, len(parts), world), first)


def _shape(world: int, mesh: Mapping[str, int]) -> str:
    dims = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return f"{world} ranks" + (f" ({dims})" if dims else "")


def _refuse(where: Path, problems: list[Problem]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DurableError(f"{where} cannot be loaded: {problems[0].what}{more}")


def _notes(snapshot: Snapshot, saved: int, now: int) -> list[str]:
    kept = dict(snapshot.values or {})
    shapes = f"saved by {saved} ranks, loaded by {now}"
    notes = []
    if "rng" in kept:
        notes.append(f"{shapes}: every rank's random number generators start anew")
    if "loader" in kept:
        notes.append(f"{shapes}: the positions of the data loaders are not carried over")
    if any(e.kind == "private" and e.fqn.startswith("model.") for e in snapshot.entries):
        notes.append(f"{shapes}: buffers of the model are those of rank {snapshot.rank}")
    return notes


class _Tensors(Mapping[str, torch.Tensor]):
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


class _Reader(FileSystemReader):
    """DCP's reader with metadata of ours, so that ``.metadata`` is not unpickled."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """DCP's planner, but values are unpickled with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], loads(value, name))


def _cause(err: BaseException) -> str:
    """The first line of what went wrong, of the lowest rank where it did."""
    if isinstance(err, CheckpointException):
        for _, failure in sorted(err.failures.items(), key=lambda item: item[0]):
            said = failure[0] if isinstance(failure, tuple) else failure
            return str(said).splitlines()[0] if str(said) else type(said).__name__
    return str(err).splitlines()[0] if str(err) else type(err).__name__
