"""Write one snapshot file into the durable tier, with the file writer of torch's own DCP.

The snapshot stays mapped and each record is written straight from it: at no time is there a copy
of more than one tensor. The place of each record goes into the rank's part (``parts``).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ...format import digest
from ...format.dtypes import TORCH, view
from ...format.layout import Entry, FileLayout, LayoutError, Snapshot, parse_header
from ...format.sizes import megabytes
from ..files import (
    DurableError,
    digest_inside,
    explain,
    remove,
    size_inside,
    sync_directory,
    write_whole,
)
from ..parts import File, FileSpan, Part, Plain, data_prefix, encode_part, part_name, read_part
from ..tier import read_manifest, step_dir
from .values import describe_values

SPARE = 16 << 20  # bytes that must be free beyond the data: records' headers, part, manifest
_COMPARED = 1 << 20  # bytes of a private tensor that is compared with other ranks'


class Written(NamedTuple):
    """Result of writing a snapshot."""

    step: int
    rank: int
    bytes: int
    already: bool
    """This attempt had written it before."""


def write(source: str, directory: Path, attempt: str, expected: list[int] | None = None) -> Written:
    """Write the snapshot file ``source`` below ``directory`` as part of ``attempt``.

    ``expected`` is the digest that the file must have. Raises DurableError; nothing that a commit
    could use is left then.
    """
    with _Mapped(source, expected) as mapped:
        snapshot = mapped.snapshot
        where = step_dir(directory, snapshot.step)
        doing = f"writing rank {snapshot.rank}'s part of step {snapshot.step}"
        try:
            if not Path(directory).is_dir():
                raise FileNotFoundError(2, "", str(directory))
            done = _already(where, attempt, mapped)
            if done is not None:
                return Written(snapshot.step, snapshot.rank, done, True)
            _check_room(Path(directory), mapped.plan.size, doing)
            if not where.is_dir():
                where.mkdir(exist_ok=True)
                sync_directory(Path(directory))
            try:
                written = _write(mapped, where, attempt, doing)
            except (OSError, DurableError):
                with contextlib.suppress(OSError):  # other ranks have written there
                    where.rmdir()
                raise
        except OSError as err:
            raise DurableError(explain(err, doing, where)) from None
    return Written(snapshot.step, snapshot.rank, written, False)


class _Mapped:
    """A snapshot file, open and checked. Raises DurableError."""

    def __init__(self, source: str, expected: list[int] | None) -> None:
        self._source = source
        try:
            self._file = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as err:
            raise DurableError(explain(err, "opening a snapshot", source)) from None
        try:
            self.snapshot, self.plan = self._header()
            self.digest = digest.take(self._file, self.plan.size)
            # Private, so that torch may take the memory for writable; nothing writes to it.
            self.memory = mmap.mmap(self._file, self.plan.size, access=mmap.ACCESS_COPY)
        except (OSError, LayoutError) as err:
            os.close(self._file)
            raise DurableError(f"the snapshot {source} cannot be used: {err}") from None
        if expected is not None and expected != self.digest:
            self.__exit__()
            bad = [i for i, (a, b) in enumerate(zip(expected, self.digest, strict=False)) if a != b]
            said = digest.describe(bad or [0], self.plan.size)
            raise DurableError(f"the snapshot {source} is not written: {said}")

    def _header(self) -> tuple[Snapshot, FileLayout]:
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, 8, 0)
        raw = os.pread(self._file, 8 + int.from_bytes(head, "little") % (1 << 32), 0)
        return parse_header(raw, size)

    def check_unchanged(self) -> None:
        """Raise DurableError if the file was given another snapshot meanwhile."""
        try:
            now = self._header()[0]
            same = (now[:5], now.line) == (self.snapshot[:5], self.snapshot.line)
        except (OSError, LayoutError):
            same = False
        if not same:
            raise DurableError(
                f"the snapshot {self._source} was overwritten while it was written out; this step "
                "is not saved, the next one will be"
            )

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        # The mapping goes when the last tensor over it does.


def _already(where: Path, attempt: str, mapped: _Mapped) -> int | None:
    """Bytes of this rank's part if this attempt wrote this very snapshot before, else None.

    Clears away an unfinished one. Raises DurableError if the attempt has committed other content
    under this name: two runs must not share one.
    """
    rank = mapped.snapshot.rank
    name = part_name(attempt, rank)
    try:
        part = read_part(where, name)
        whole = all(size_inside(where, file.name) == file.size for file in part.files)
        if whole and part.source == mapped.digest:
            return part.bytes
    except (DurableError, OSError):
        pass
    try:
        ours = read_manifest(where).attempt == attempt
    except DurableError:
        ours = False
    if ours and (where / name).exists():
        raise DurableError(
            f"{where} holds this step already, saved by another run under the same name "
            f"({attempt}); use a directory per run, or remove that step"
        )
    remove(where / name)
    return None


def _check_room(where: Path, size: int, doing: str) -> None:
    free = shutil.disk_usage(where).free
    short = size + SPARE - free
    if short > 0:
        raise DurableError(
            f"{doing}: {where}: {megabytes(size)} to write and {megabytes(SPARE)} to spare, "
            f"{megabytes(free)} free, so {megabytes(short)} are missing; free space there, or keep "
            "fewer checkpoints"
        )


def _write(mapped: _Mapped, where: Path, attempt: str, doing: str) -> int:
    rank = mapped.snapshot.rank
    prefix = data_prefix(attempt, rank)
    try:
        part = _write_data(mapped, where, attempt, prefix)
        mapped.check_unchanged()
        sync_directory(where)
        write_whole(where / part_name(attempt, rank), encode_part(part))
    except (OSError, RuntimeError, DurableError) as err:
        for left in where.glob(prefix + "*.distcp"):
            remove(left)
        if isinstance(err, RuntimeError):  # torch hides why its stream could not be written
            free = shutil.disk_usage(where).free if where.exists() else 0
            raise DurableError(
                f"{doing}: {where}: {str(err).splitlines()[0]}; {megabytes(free)} are free "
                "there, is a quota used up or the file system gone?"
            ) from None
        raise
    return part.bytes


def _write_data(mapped: _Mapped, where: Path, attempt: str, prefix: str) -> Part:
    snapshot, plan = mapped.snapshot, mapped.plan
    tensors = {
        entry.name: view(mapped.memory, offset, entry)
        for entry, offset in zip(plan.entries, plan.offsets, strict=True)
    }
    found = describe_values(snapshot, tensors)
    planner = _WritePlanner(tensors, found.plain)
    items = [_tensor_item(entry) for entry in plan.entries]
    items += [WriteItem(MetadataIndex(_PLAIN + n), WriteItemType.BYTE_IO) for n in found.plain]
    # copy_ahead 0: with a GPU in the node torch would otherwise use it to copy.
    storage = FileSystemWriter(where, thread_count=1, per_thread_copy_ahead=0)
    results = storage.write_data(SavePlan(items, _StoragePrefix(prefix)), planner).wait()
    at = {result.index.fqn: result.storage_data for result in results}
    names = sorted({str(info.relative_path) for info in at.values()})
    files = []
    for name in names:
        size, crcs = digest_inside(where, name)
        files.append(File(name, size, crcs))

    def place(key: str) -> FileSpan:
        info = at[key]
        return FileSpan(names.index(str(info.relative_path)), int(info.offset), int(info.length))

    return Part(
        attempt=attempt,
        snapshot=snapshot,
        source=mapped.digest,
        files=tuple(files),
        places=tuple(place(_TENSOR + entry.name) for entry in snapshot.entries),
        paths=found.paths,
        plain=tuple(
            Plain(name, path, place(_PLAIN + name)) for name, (path, _) in found.plain.items()
        ),
        groups=found.groups,
        aliases=found.aliases,
        contents=tuple(
            _content(mapped.memory, entry, offset)
            for entry, offset in zip(plan.entries, plan.offsets, strict=True)
            if entry.kind == "private"
        ),
    )


def _content(memory: mmap.mmap, entry: Entry, offset: int) -> str:
    """Return a mark that is equal for equal tensors of one type and shape; "" for a tensor that
    takes too long to compare."""
    if entry.nbytes > _COMPARED:
        return ""
    raw = memory[offset : offset + entry.nbytes]
    return "=" + (raw.hex() if len(raw) <= 16 else hashlib.blake2b(raw, digest_size=16).hexdigest())


_TENSOR, _PLAIN = "t:", "p:"  # so that a value and a tensor never share a key


class _WritePlanner(DefaultSavePlanner):
    """Answers with views of the snapshot."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        plain: Mapping[str, tuple[tuple[str | int, ...], Any]],
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._plain = plain

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if key.startswith(_TENSOR):
            return self._tensors[key.removeprefix(_TENSOR)]
        raw = io.BytesIO()
        torch.save(self._plain[key.removeprefix(_PLAIN)][1], raw)
        return raw


def _tensor_item(entry: Entry) -> WriteItem:
    shape = torch.Size(entry.shape)
    return WriteItem(
        index=MetadataIndex(_TENSOR + entry.name),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size([0] * len(shape)), shape),
            properties=TensorProperties(dtype=TORCH[entry.dtype]),
            size=shape,
        ),
    )
