"""The metadata of torch's DCP for a checkpoint of ours, built from the ranks' parts.

Others read it from ``.metadata``, which DCP pickles; we build it anew from JSON each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ...format.dtypes import TORCH
from ..files import DurableError
from ..merge import Merged
from ..parts import FileSpan, Outline

Keys = tuple[str | int, ...]
MAX_BLOCKS = 1_000_000
"""Limit for all tensors together. DCP holds several objects for each block, and pickles them."""


class TooManyBlocks(DurableError):
    """The checkpoint is of so many blocks that DCP's metadata would not fit into memory."""


def build(merged: Merged, parts: Sequence[Outline]) -> tuple[Metadata, list[WriteResult]]:
    """The state's metadata, and where everything lies: the arguments of DCP's ``finish``.

    Raises TooManyBlocks, and ValueError if a part is not what it should be.
    """
    if merged.blocks > MAX_BLOCKS:
        raise TooManyBlocks(
            f"{merged.blocks} blocks of tensors are more than torch.distributed.checkpoint can "
            f"list ({MAX_BLOCKS}); resume() loads the step all the same, and robust-ckpt export "
            "makes one file of it"
        )
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results: list[WriteResult] = []
    paths: dict[str, Keys] = {}
    tree = Tree()

    def add(index: MetadataIndex, rank: int, place: FileSpan) -> None:
        name = parts[rank].files[place.file].name
        results.append(
            WriteResult(index, place.length, _StorageInfo(name, place.offset, place.length))
        )

    for whole in merged.tensors:
        name, path = whole.name, tree.enter(whole.name, whole.path)
        while path is None:  # another rank has a dict where this one has a tensor
            name += f"@{whole.ranks[0]}"
            path = tree.enter(name, (name,))
        chunks = []
        for number, chunk in enumerate(whole.chunks()):
            offsets = torch.Size(chunk.entry.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.entry.shape)))
            add(MetadataIndex(name, offsets, number), chunk.rank, chunk.place)
        state[name] = TensorStorageMetadata(
            TensorProperties(dtype=TORCH[whole.dtype]), torch.Size(whole.shape), chunks
        )
        paths[name] = path
    for value in merged.values:
        path = tree.enter(value.name, value.path)
        if path is not None:
            state[value.name] = BytesStorageMetadata()
            paths[value.name] = path
            add(MetadataIndex(value.name), value.rank, value.place)
    return Metadata(state, planner_data=paths), results


class Tree:
    """The nested state that all paths together form.

    DCP builds it from the paths and flattens it again, so a path, joined, must give the name, and
    no path may lead through a leaf or mix a list with a dict. Ranks that keep different things
    under one name could otherwise make a checkpoint that DCP's own tools cannot read.
    """

    def __init__(self) -> None:
        self._root: dict[str | int, object] = {}

    def enter(self, name: str, path: Keys) -> Keys | None:
        """``path``, or the flat one where that does not fit; None if neither does."""
        for each in (path, (name,)):
            if self._fits(each):
                at: dict[str | int, object] = self._root
                for key in each[:-1]:
                    below = at.setdefault(key, {})
                    assert isinstance(below, dict)
                    at = below
                at[each[-1]] = None
                return each
        return None

    def _fits(self, path: Keys) -> bool:
        at: object = self._root
        for key in path:
            if not isinstance(at, dict):
                return False
            if at and isinstance(next(iter(at)), int) != isinstance(key, int):
                return False
            if key not in at:
                return True
            at = at[key]
        return False


def write_metadata(
    scratch: Path, about: StorageMeta, metadata: Metadata, results: list[WriteResult]
) -> None:
    """Have DCP write ``.metadata`` into the directory ``scratch``. Raises OSError.

    The same arguments give the same bytes.
    """
    _Writer(scratch, about).finish(metadata, [results])


class _Writer(FileSystemWriter):
    """DCP's, but what it says about itself is given."""

    def __init__(self, path: Path, about: StorageMeta) -> None:
        super().__init__(path)
        self._about = about

    def storage_meta(self) -> StorageMeta:
        return self._about
