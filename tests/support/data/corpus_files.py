"""Files of every format that sources read, with the same records."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from robust_slurm.data import arrow, jsonl, parquet, tar

Rows = Sequence[dict[str, Any]]


def lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def halves(content: bytes) -> tuple[bytes, bytes]:
    return content[: len(content) // 2], content[len(content) // 2 :]


def tar_of(rows: Rows) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, row in enumerate(rows):
            for ending, content in (("json", json.dumps(row).encode()), ("Txt", b"text")):
                member = tarfile.TarInfo(f"train/s.dir/{number:04}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def parquet_of(rows: Rows) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=4)
    return file.getvalue()


def arrow_of(rows: Rows, file_form: bool = False) -> bytes:
    file = io.BytesIO()
    table = pa.Table.from_pylist(list(rows))
    with (pa.ipc.new_file if file_form else pa.ipc.new_stream)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return file.getvalue()


Write = Callable[[Rows], bytes]
FORMATS: dict[str, tuple[Any, Write]] = {
    "jsonl": (jsonl, lines),
    "jsonl.gz": (jsonl, lambda rows: gzip.compress(lines(rows))),
    "jsonl.zst": (jsonl, lambda rows: b"".join(map(zstandard.compress, halves(lines(rows))))),
    "tar": (tar, tar_of),
    "tar.gz": (tar, lambda rows: gzip.compress(tar_of(rows))),
    "tar.zst": (tar, lambda rows: zstandard.compress(tar_of(rows))),
    "parquet": (parquet, parquet_of),
    "arrow": (arrow, arrow_of),
    "ipc": (arrow, lambda rows: arrow_of(rows, file_form=True)),
}  # fmt: skip
