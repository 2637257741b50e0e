"""Products that are wrong always, now and then, or never."""

from __future__ import annotations

from typing import Any

import broken_products
import pytest
import torch

from health.active.worker import gemm
from health.active.worker.bits import capability, libraries
from health.active.worker.device import WorkerDevice, raw

pytestmark = pytest.mark.slow

CPU = WorkerDevice("cpu", "cpu")
KINDS = gemm.kinds(cuda=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_sound_device_has_speeds_and_nothing_wrong(seed: int) -> None:
    (found,) = gemm.run([CPU], 0.4, seed)
    assert (found.wrong, found.error, found.device) == ((), "", "cpu")
    for name in ("fp32_tflops", "bf16_tflops"):
        assert 0 < found.values[f"{name}_slowest"] <= 1.5 * found.values[name]


def test_a_sound_product_has_a_digest_that_depends_on_the_seed() -> None:
    (one,), (same,), (other,) = (gemm.run([CPU], 0.01, seed) for seed in (1, 1, 2))
    assert one.digests == same.digests
    assert not set(one.digests.values()) & set(other.digests.values())
    threads = torch.get_num_threads()
    assert list(one.digests) == [
        f"gemm/{name}/cpu/{capability(CPU)}/{torch.__version__}/{libraries()}"
        f"/256x256x256-t{threads}/1/r{gemm.RECIPE}"
        for name in ("fp32", "bf16")
    ]


class LikeGpu(WorkerDevice):
    """The CPU, with what is done differently on a GPU."""

    @property
    def cuda(self) -> bool:
        return True


def test_a_gpus_products_are_timed_together_and_all_compared() -> None:
    load = gemm._sustained(LikeGpu("gpu0", "m"), gemm.FP32, 64, 0.0, 1)
    assert len(load.took) == gemm.AT_ONCE_GPU and len(set(load.took)) == 1 and not load.wrong
    real, calls = torch.mm, 0

    def third(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(a, b) + (calls == 5)  # the two before the load are not timed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", third)
        (line,) = gemm._sustained(LikeGpu("gpu0", "m"), gemm.FP32, 64, 0.0, 1).wrong
    assert line.startswith("fp32 product 3: ")


def test_a_kernel_that_is_always_wrong_is_found() -> None:
    found = broken_products.run("gemm", 1, 1.0)
    assert "error" not in found and "digests" not in found
    assert "product of whole numbers: (255, 255) is" in found["wrong"][0]
    assert "fp32" in " ".join(found["wrong"])


def test_a_kernel_that_is_wrong_now_and_then_is_found() -> None:
    found = broken_products.run("gemm", 6, 0.05)  # the second product of the load
    assert any("not what the same product gave before" in line for line in found["wrong"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [256, 320, 2048])
def test_no_sum_of_whole_numbers_has_to_be_rounded(kind: gemm.Arithmetic, n: int) -> None:
    left, right = gemm.whole(kind, n, 1, CPU.torch)
    most = int(left.abs().sum(1).max()) * int(right.abs().max())
    assert most <= kind.exact
    assert torch.equal(left.to(kind.dtype).to(torch.int64), left)
    assert torch.equal(right.to(kind.dtype).to(torch.int64), right)
    assert int((left != 0).sum(0).min()) > 0  # every column is used


def changed(at: tuple[int, int], how: str) -> Any:
    real = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a, b)
        if how == "nan":
            out[at] = torch.nan
        elif how == "half":
            out[at] += 0.5
        elif how == "swap":  # sums of the row stay what they were
            out[at[0]] = out[at[0]].roll(1)
        elif how == "sign of zero":
            out[at] = -0.0
        else:
            out[at] += 1
        return out

    return mm


@pytest.mark.parametrize("how", ["one", "nan", "half", "swap"])
@pytest.mark.parametrize("kind", [gemm.FP32, gemm.BF16], ids=["fp32", "bf16"])
def test_the_same_wrong_element_every_time_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, how: str, kind: gemm.Arithmetic
) -> None:
    monkeypatch.setattr(torch, "mm", changed((7, 9), how))
    (line,) = gemm.wrong_number(CPU, kind, 256, 3)
    assert line.startswith(f"{kind.name} product of whole numbers: (7, ")
    assert how == "swap" or ": (7, 9) is" in line
    assert "1 of 256 rows" in line


def test_a_difference_is_told_bit_by_bit() -> None:
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 2] = -0.0
    assert not torch.equal(raw(a), raw(b))
    assert "1 of 6 elements" in gemm.difference(b, a)
    assert "(1, 2) is -0.0, it was 0.0" in gemm.difference(b, a)


def test_the_precision_of_products_is_as_before() -> None:
    before = torch.get_float32_matmul_precision()
    gemm.run([CPU], 0.01, 1)
    assert torch.get_float32_matmul_precision() == before
