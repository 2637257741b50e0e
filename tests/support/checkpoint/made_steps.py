"""Parts and committed steps of the durable tier, made without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.durable.files import digest_of
from robust_slurm.checkpoint.durable.parts import (
    File,
    FileSpan,
    Part,
    Plain,
    encode_part,
    part_name,
)
from robust_slurm.checkpoint.format.layout import Entry, Snapshot


def entry(
    fqn: str, shape: Sequence[int], kind: str = "private", *, whole: Any = None, at: Any = None
) -> Entry:
    shape = tuple(shape)
    return Entry(
        fqn, "F32", shape, fqn, tuple(whole or shape), tuple(at or (0,) * len(shape)), kind
    )


def part(
    rank: int,
    entries: Sequence[Entry],
    *,
    world: int = 2,
    needs: Sequence[int] = (),
    mesh: dict[str, int] | None = None,
    plain: Sequence[str] = (),
    groups: Sequence[tuple[str, tuple[str, ...]]] = (),
    step: int = 100,
    attempt: str = "7.e0",
) -> Part:
    snapshot = Snapshot(
        step, rank, world, 0, "7", mesh or {}, tuple(needs or [rank]), {"x": 1}, tuple(entries)
    )
    file = File(f"{attempt}-{rank}_0.distcp", 1000, [rank])
    return Part(
        attempt, snapshot, [1, 2], (file,), tuple(FileSpan(0, i, 900) for i in range(len(entries))),
        {}, tuple(Plain(n, tuple(n.split(".")), FileSpan(0, 0, 1)) for n in plain), tuple(groups),
    )  # fmt: skip


def a_step(directory: Path, step: int, *, world: int = 2, attempt: str = "7.e0") -> Path:
    """A committed step with data that verifies, made without torch."""
    where = tier.step_dir(directory, step)
    where.mkdir(parents=True)
    pins = []
    for rank in range(world):
        data = bytes([rank]) * 1000
        made = part(rank, [entry(f"model.w{rank}", (10,))], world=world, step=step, attempt=attempt)
        made = made._replace(files=(made.files[0]._replace(digest=digest_of(data)),))
        (where / made.files[0].name).write_bytes(data)
        raw = encode_part(made)
        name = part_name(attempt, rank)
        (where / name).write_bytes(raw)
        pins.append(tier.PartFile(rank, name, len(raw), digest_of(raw)))
    (where / ".metadata").write_bytes(b"pickle")
    manifest = tier.Manifest(
        step, attempt, world, {}, 1.7e9, 1000 * world, tuple(pins), (6, digest_of(b"pickle")), ()
    )
    (where / "manifest.json").write_bytes(tier.encode_manifest(manifest))
    return where
