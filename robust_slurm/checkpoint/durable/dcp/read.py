"""Load a step of the durable tier into another number of ranks, or another mesh.

Parameters and optimizer state go through torch's DCP, which cuts them anew. It is imported only
here: it takes a second, and a training that goes on as it was does not need it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ...capture.assembly import OpenedSnapshot
from .. import tier
from ..files import DurableError
from ..merge import merge
from ..parts import File, Outline
from ..reader import Tensors, notes, refuse
from ..verify import Problem, verify_files
from .metadata import TooManyBlocks, build, with_storage
from .records import loads


def load_resharded(
    directory: str | Path, step: int, state: dict[str, Any], own: Collection[str] = ()
) -> tuple[OpenedSnapshot, list[str]]:
    """Fill ``state``, as ``dcp.load`` takes it, from ``step``, whatever ranks saved it.

    Returns all of the lowest rank, and the parts that could not be carried over, one line each.

    ``own``: names of tensors that must be the same in all ranks which saved them. Stages of a
    pipeline may have different ones of one name, and nothing tells which is the caller's.

    With torch.distributed all ranks of the default group must call it; they share the work of
    verifying. Raises DurableError (on all ranks, if the checkpoint is damaged) before ``state``
    changes, or when the checkpoint lacks something that ``state`` asks for.
    """
    where = tier.step_dir(directory, step)
    group = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    parts: list[Outline] = []
    problems: list[Problem] = []
    try:
        manifest = tier.read_manifest(where)
        parts = tier.read_outlines(where, manifest)
        lowest = tier.read_rank(where, manifest, 0)
        files: list[File] = [file for part in parts for file in part.files]
        problems = verify_files(where, files[rank::world])
    except DurableError as err:
        problems = [Problem("", str(err))]
    if group:
        gathered: list[list[Problem]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, problems)
        problems = [problem for found in gathered for problem in found]
    refuse(where, problems)
    merged = merge(parts)
    refuse(where, [Problem("", what) for what in merged.problems])
    other = [each.fqn for each in merged.tensors if each.name != each.fqn and each.fqn in own]
    if other:
        raise DurableError(
            f"{where}: {other[0]} differs between the ranks that saved it (stages of a pipeline?), "
            "and nothing tells which of them is this rank's. Go on with as many ranks as saved it"
        )
    try:
        metadata = with_storage(*build(merged, parts))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(
                state,
                storage_reader=_MetadataReader(where, metadata),
                planner=_ReadPlanner(),
                no_dist=not group,
            )
    except TooManyBlocks as err:
        raise DurableError(f"{where} is not loaded into another shape: {err}") from None
    except (CheckpointException, RuntimeError, ValueError, OSError) as err:
        raise DurableError(f"{where} does not fit what is to be loaded: {_cause(err)}") from err
    first = OpenedSnapshot(lowest.snapshot, Tensors(where, lowest))
    return first, notes(first.snapshot, len(parts), world)


class _MetadataReader(FileSystemReader):
    """DCP's reader with metadata of ours, so that ``.metadata`` is not unpickled."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _ReadPlanner(DefaultLoadPlanner):
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
