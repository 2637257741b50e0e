"""Patterns over the free memory of a device, and the bandwidth of copies in it. Imports torch.

All of the tested memory is written before any of it is read, so that no cache can answer in its
place. Each word of the address patterns has a different value: a write that went to another place,
or to two, shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from health.active.worker.device import MOST_WRONG, WorkerDevice, on_each
from health.active_tests import Level, Measured

WORD = 8  # bytes: int64
MIB = 1 << 20
GPU_SHARE = 0.95  # of the free memory that is asked for ...
GPU_SPARE = 512 * MIB  # ... but this much stays, for what comparing takes
LEAST_SHARE = 0.90
CPU_SHARE = 0.05
CPU_MOST: dict[Level, int] = {"quick": 256 * MIB, "standard": 1024 * MIB, "long": 8192 * MIB}
COPIES = 5  # measurements, of which the median is the bandwidth
# Copies timed together: one of 0.5 GiB takes a GPU under 1 ms, too short beside its own start.
AT_ONCE_GPU = 12


class Pattern(NamedTuple):
    """``address``: words are their own number, or its complement; else all are ``word``."""

    name: str
    word: int
    address: bool = False


# Own address first: if there is time for one pattern only, it is the one that shows most.
PATTERNS = (
    Pattern("own address", 0, True),
    Pattern("own address, inverted", -1, True),
    Pattern("0x55", 0x5555555555555555),
    Pattern("0xaa", -0x5555555555555556),
    Pattern("0x00", 0),
    Pattern("0xff", -1),
)


def run(devices: Sequence[WorkerDevice], level: Level, seconds: float) -> list[Measured]:
    """Every device by itself, all at the same time."""
    return on_each("memory", devices, lambda device: one(device, level, seconds))


def one(device: WorkerDevice, level: Level, seconds: float) -> Measured:
    """At least one pattern over all of it, then others as long as there are ``seconds`` left."""
    until = time.monotonic() + seconds
    free = device.free()
    chunks = _take(device, _wanted(device, level, free))
    covered = sum(chunk.numel() for chunk in chunks) * WORD
    if not covered:
        error = f"no memory could be allocated: {free} bytes are free"
        return Measured("memory", "", error=error)
    wrong: list[str] = []
    done = 0
    while not done or (time.monotonic() < until and len(wrong) < MOST_WRONG):
        pattern = PATTERNS[done % len(PATTERNS)]
        fill(chunks, pattern)
        device.synchronize()
        wrong += _read(chunks, pattern)
        done += 1
    gbps, differ = _bandwidth(device, chunks[0])
    error = ""
    if device.cuda and covered < LEAST_SHARE * min(free, _wanted(device, level, free) / GPU_SHARE):
        error = f"only {covered} of {free} free bytes could be allocated and tested"
    values = {
        "memory_gbps": gbps,
        "covered_bytes": float(covered),
        "covered_share": covered / free,
        "patterns": float(done),
    }
    return Measured(
        "memory", "", values=values, wrong=tuple((wrong + differ)[:MOST_WRONG]), error=error
    )


def _wanted(device: WorkerDevice, level: Level, free: int) -> int:
    """Bytes to test; of the CPU's memory, which other processes share, only a small sample."""
    if device.cuda:
        return max(0, min(int(GPU_SHARE * free), free - GPU_SPARE))
    return min(int(CPU_SHARE * free), CPU_MOST[level])


def _take(device: WorkerDevice, wanted: int) -> list[torch.Tensor]:
    """Chunks of int64 that together hold ``wanted`` bytes, or as many as there are."""
    size = (1024 if device.cuda else 128) * MIB
    chunks: list[torch.Tensor] = []
    while wanted >= MIB:
        words = min(size, wanted) // WORD
        try:
            chunks.append(torch.empty(words, dtype=torch.int64, device=device.torch))
        except torch.OutOfMemoryError:  # somebody else takes it too, or it is in pieces
            break
        wanted -= words * WORD
    return chunks


def _pieces(chunks: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the first word, words): few enough that comparing needs little memory."""
    first = 0
    for chunk in chunks:
        words = (128 if chunk.is_cuda else 4) * MIB // WORD
        for at in range(0, chunk.numel(), words):
            piece = chunk[at : at + words]
            yield first + at, piece
        first += chunk.numel()


def fill(chunks: Sequence[torch.Tensor], pattern: Pattern) -> None:
    """Write the pattern over all of it."""
    for first, piece in _pieces(chunks):
        _write(piece, first, pattern)


def _write(piece: torch.Tensor, first: int, pattern: Pattern) -> None:
    if pattern.address:
        torch.arange(first, first + piece.numel(), out=piece)
        if pattern.word:
            piece.bitwise_not_()
    else:
        piece.fill_(pattern.word)


def _read(chunks: Sequence[torch.Tensor], pattern: Pattern) -> list[str]:
    """Compare all of it; a line for each piece (at most MOST_WRONG) that is not as written."""
    wrong: list[str] = []
    must = torch.empty(0, dtype=torch.int64, device=chunks[0].device)
    for first, piece in _pieces(chunks):
        if pattern.address:
            must = must.resize_(piece.numel())
            _write(must, first, pattern)
            bad = piece != must
        else:
            bad = piece != pattern.word
        if not bool(bad.any()):
            continue
        places = bad.nonzero().flatten()
        at = int(places[0])
        want = int(must[at]) if pattern.address else pattern.word
        wrong.append(_line(pattern.name, (first + at) * WORD, want, int(piece[at]), len(places)))
        if len(wrong) >= MOST_WRONG:
            break
    return wrong


def _line(name: str, offset: int, want: int, got: int, count: int) -> str:
    more = f"; {count - 1} more words near it" if count > 1 else ""
    want, got = want % (1 << 64), got % (1 << 64)
    flipped = (want ^ got).bit_count()
    return (
        f"pattern {name}: at offset {offset} must be {want:#018x}, is {got:#018x} "
        f"({flipped} bits differ){more}"
    )


def _bandwidth(device: WorkerDevice, chunk: torch.Tensor) -> tuple[float, list[str]]:
    """1e9 bytes/s read and written together, by copying one half of a chunk over the other."""
    half = chunk.numel() // 2
    source, target = chunk[:half], chunk[half : 2 * half]
    pattern = PATTERNS[0]
    _write(source, 0, pattern)
    times = AT_ONCE_GPU if device.cuda else 1
    took = sorted(device.timed(lambda: target.copy_(source), times) for _ in range(COPIES))
    wrong = [f"copied, {line}" for line in _read([target], pattern)]
    return 2 * half * WORD / took[len(took) // 2] / 1e9, wrong
