"""Matrix products: how fast, the same bits every time, and the right ones. Imports torch.

Three things are looked at for every kind of arithmetic (fp32, tf32, bf16, fp16):

- **speed** of products of random fractions, which draw more power than whole numbers do;
- **the same bits**: every product is compared with the first one of the same factors, whose
  digest is compared with other machines' (``alignment.py``);
- **the right number**: a product of whole numbers, chosen so that no order of summation and no
  format has to round, against the exact one, before and after the load. That is R. Freivalds'
  check (IFIP 1977) in int64 and without any matrix product: a kernel that is wrong in the same
  way every time does not pass it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from health.active.worker.bits import digest, environment
from health.active.worker.device import MOST_WRONG, WorkerDevice, fractions, integers, on_each, raw
from health.active_tests import Measured

WINDOWS = 10  # parts of the load; the slowest is reported, as a single product is noise
RECIPE = 1  # to be raised with every change of the products that have a digest
AT_ONCE_GPU = 4  # products timed together: each one starts while the one before runs
_ROWS = 1024  # of a matrix at a time, where int64 needs several times its memory
_VECTOR = 1 << 15  # of Freivalds' vector: a wrong row passes with 1 : 65537


class Arithmetic(NamedTuple):
    """A kind of arithmetic. ``exact``: up to here it holds every whole number."""

    name: str
    dtype: torch.dtype
    exact: int
    bits: int  # of a fraction that it holds
    precision: str = "highest"


FP32 = Arithmetic("fp32", torch.float32, 1 << 24, 23)
TF32 = Arithmetic("tf32", torch.float32, 1 << 24, 23, "high")
BF16 = Arithmetic("bf16", torch.bfloat16, 1 << 8, 7)
FP16 = Arithmetic("fp16", torch.float16, 1 << 11, 10)


def kinds(cuda: bool) -> tuple[Arithmetic, ...]:
    """Return the kinds worth testing; TF32 exists on GPUs only."""
    return (FP32, TF32, BF16, FP16) if cuda else (FP32, BF16)


def size(device: WorkerDevice) -> int:
    """Rows and columns: enough to fill a GPU, few enough that a slow core does many products."""
    return 8192 if device.cuda else 256


def run(devices: Sequence[WorkerDevice], seconds: float, seed: int) -> list[Measured]:
    """``seconds`` for all kinds together, all devices at the same time."""
    chosen = kinds(devices[0].cuda)
    answers = [Measured("gemm", "", device.name, device.model) for device in devices]
    for kind in chosen:
        # Of the whole process, and changes bits: so all devices do one kind at a time.
        torch.set_float32_matmul_precision(kind.precision)
        try:
            part = partial(one, kind=kind, seconds=seconds / len(chosen), seed=seed)
            parts = on_each("gemm", devices, part)
        finally:
            torch.set_float32_matmul_precision("highest")
        answers = [_both(a, b) for a, b in zip(answers, parts, strict=True)]
    return answers


def _both(a: Measured, b: Measured) -> Measured:
    return a._replace(
        values={**a.values, **b.values},
        digests={**a.digests, **b.digests},
        wrong=a.wrong + b.wrong,
        error=a.error or b.error,
        seconds=round(a.seconds + b.seconds, 3),
    )


def one(device: WorkerDevice, kind: Arithmetic, seconds: float, seed: int) -> Measured:
    """One kind on one device."""
    n = size(device)
    wrong = wrong_number(device, kind, n, seed)
    load = _sustained(device, kind, n, seconds, seed)
    took = load.took
    wrong += load.wrong + wrong_number(device, kind, n, seed + 1)
    rates = [2 * n**3 * len(window) / sum(window) / 1e12 for window in _windows(took)]
    values = {
        f"{kind.name}_tflops": 2 * n**3 / statistics.median(took) / 1e12,
        f"{kind.name}_tflops_slowest": min(rates),
    }
    digests = {} if wrong else {key(device, kind, n, seed): load.digest}
    return Measured("gemm", "", values=values, digests=digests, wrong=tuple(wrong[:MOST_WRONG]))


def key(device: WorkerDevice, kind: Arithmetic, n: int, seed: int) -> str:
    """Return a digest's key: "gemm/DTYPE/MODEL/CAPABILITY/TORCH/LIBRARIES/SHAPE/SEED/RECIPE".

    On a CPU the number of threads is part of the shape: it decides in which order sums are made.
    """
    shape = f"{n}x{n}x{n}" + ("" if device.cuda else f"-t{torch.get_num_threads()}")
    return "/".join(("gemm", kind.name, *environment(device), shape, str(seed), f"r{RECIPE}"))


class _Load(NamedTuple):
    """Seconds of each product; a line for each that is not what the first was, and its digest."""

    took: list[float]
    wrong: list[str]
    digest: str


def _windows(took: list[float]) -> list[list[float]]:
    step = math.ceil(len(took) / WINDOWS)
    return [took[at : at + step] for at in range(0, len(took), step)]


def _sustained(device: WorkerDevice, kind: Arithmetic, n: int, seconds: float, seed: int) -> _Load:
    """Products of the same factors for ``seconds``; every one is compared."""
    left, right = (
        fractions(seed * 2 + side, n * n, kind.bits, device.torch).to(kind.dtype).view(n, n)
        for side in (0, 1)
    )
    torch.mm(left, right)  # the first one chooses a kernel and takes memory
    made: list[torch.Tensor] = []
    took: list[float] = []
    wrong: list[str] = []
    reference = torch.mm(left, right)
    until = time.monotonic() + seconds
    times = AT_ONCE_GPU if device.cuda else 1
    while len(took) < 2 or (time.monotonic() < until and len(wrong) < MOST_WRONG):
        each = device.timed(lambda: made.append(torch.mm(left, right)), times)
        for product in made:
            took.append(each)
            if not torch.equal(raw(product), raw(reference)):
                wrong.append(f"{kind.name} product {len(took)}: {difference(product, reference)}")
        made.clear()
    return _Load(took, wrong, digest([reference]))


def difference(got: torch.Tensor, reference: torch.Tensor) -> str:
    """Describe the difference in bits: how many elements differ, and the first of them."""
    places = (raw(got) != raw(reference)).flatten().nonzero().flatten()
    at = int(places[0])
    row, column = divmod(at, got.shape[-1])
    return (
        f"{len(places)} of {got.numel()} elements are not what the same product gave before; "
        f"({row}, {column}) is {got.flatten()[at].item()!r}, "
        f"it was {reference.flatten()[at].item()!r}"
    )


def wrong_number(device: WorkerDevice, kind: Arithmetic, n: int, seed: int) -> list[str]:
    """A line if a product of whole numbers is not the exact one."""
    left, right = whole(kind, n, seed, device.torch)
    product = torch.mm(left.to(kind.dtype), right.to(kind.dtype))
    number = product.to(torch.int64)
    odd = number.to(kind.dtype) != product  # also true for NaN and infinity
    vector = integers(seed + 3, n, _VECTOR, device.torch)
    off = (_times(number, vector) != _times(left, _times(right, vector))) | odd.any(1)
    if not bool(off.any()):
        return []
    rows = off.nonzero().flatten()
    row = int(rows[0])
    must = torch.cat([(right[:, at : at + _ROWS] * left[row][:, None]).sum(0) for at in _starts(n)])
    places = (must.to(kind.dtype) != product[row]).nonzero().flatten()
    if not len(places):  # the check, not the product, was calculated wrongly: by the same device
        return [f"{kind.name}: the check of row {row} in whole numbers came out wrong"]
    column = int(places[0])
    return [
        f"{kind.name} product of whole numbers: ({row}, {column}) is "
        f"{product[row, column].item()!r}, must be {int(must[column])}; {len(rows)} of {n} rows "
        "have such elements"
    ]


def whole(
    kind: Arithmetic, n: int, seed: int, at: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 factors whose sums of products stay within ``kind.exact``, in any order.

    So |a|*|b|*(numbers in a row) <= exact. Where even factors of 1 exceed that, only every n-th
    number of a row is not 0, shifted by one column from row to row.
    """
    most = max(1, math.isqrt(kind.exact // n))
    most = min(most, 1 << kind.bits, 1 << 10)  # tf32 and fp16 hold these
    left = integers(seed * 2 + 5, n * n, most, at).view(n, n)
    right = integers(seed * 2 + 6, n * n, most, at).view(n, n)
    every = math.ceil(n * most * most / kind.exact)
    if every > 1:
        lines = torch.arange(n, device=at)
        left *= (lines[:, None] + lines[None, :]) % every == 0
    return left, right


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Exact, row by row, without the kernels of matrix products."""
    return torch.cat([(matrix[at : at + _ROWS] * vector).sum(1) for at in _starts(len(matrix))])


def _starts(n: int) -> range:
    return range(0, n, _ROWS)
