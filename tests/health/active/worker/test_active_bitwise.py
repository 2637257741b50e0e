"""The same bits from every process, other ones from a broken kernel."""

from __future__ import annotations

import math
import platform
from hashlib import blake2b
from pathlib import Path
from typing import Any

import broken_products
import pytest
import torch

from health.active.worker import bitwise
from health.active.worker.bits import cpu_kind, libraries
from health.active.worker.bitwise import Trained, train
from health.active.worker.device import WorkerDevice

CPU = WorkerDevice("cpu", "cpu")


@pytest.mark.slow
def test_two_processes_agree_and_a_broken_one_differs() -> None:
    one, other, broken = (
        broken_products.run("bitwise", 3, 0),
        broken_products.run("bitwise", 3, 0),
        broken_products.run("bitwise", 3, 1.0),
    )
    assert one["digests"] == other["digests"]
    assert len(one["digests"]) == 2
    # Always the same wrong bits: it agrees with itself, and with nobody else.
    assert set(broken["digests"]) == set(one["digests"])
    assert all(broken["digests"][key] != one["digests"][key] for key in one["digests"])


@pytest.mark.slow
def test_a_device_that_does_not_agree_with_itself_is_wrong_and_has_no_digest() -> None:
    found = broken_products.run("bitwise", 4, 0.02)
    assert "digests" not in found
    assert [line.split()[0] for line in found["wrong"]] == ["dense", "moe"]
    assert "from step " in found["wrong"][0] or "in gradients" in found["wrong"][0]


def test_keys_name_what_may_change_bits() -> None:
    (found,) = bitwise.run([CPU], bitwise.MODELS, 2, 0.0, 7)
    assert not found.error
    for name, key in zip(bitwise.MODELS, found.digests, strict=True):
        model, kind, capability, version, built, steps, seed, recipe = key.split("/")
        assert (model, kind, steps, seed) == (name, "cpu", "2", "7")
        assert (version, built) == (torch.__version__, libraries())
        assert torch.backends.cpu.get_cpu_capability() in capability
        assert recipe == f"r{bitwise.RECIPE}"


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (torch.__config__, "show", lambda: "built with another MKL"),
        (torch.version, "cuda", "11.0"),
        (platform, "libc_ver", lambda: ("glibc", "2.17")),
    ],
)
def test_other_libraries_are_another_key(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, other: Any
) -> None:
    before = bitwise.key(CPU, "dense", 1, 1)
    assert bitwise.key(CPU, "dense", 1, 1) == before
    monkeypatch.setattr(owner, name, other)
    assert bitwise.key(CPU, "dense", 1, 1) != before


def test_the_process_is_left_as_it_was() -> None:
    torch.set_num_threads(2)
    bitwise.run([CPU], ["dense"], 1, 0.0, 1)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("name", bitwise.MODELS)
def test_models_learn_and_depend_on_their_numbers(name: str) -> None:
    got = train(CPU, name, 3, 1)
    assert all(math.isfinite(loss) for loss in got.losses)
    assert got.losses[0] == pytest.approx(math.log(bitwise.CPU.classes), rel=0.15)
    assert len({train(CPU, name, 3, seed).digest for seed in (1, 2)} - {got.digest}) == 1
    assert train(CPU, name, 2, 1).digest != got.digest


def test_all_experts_get_tokens_and_gradients() -> None:
    model = bitwise.Model(bitwise.CPU, True, 1, CPU)
    loss = model.loss(*bitwise._batch(bitwise.CPU, 1, CPU.torch))
    gradients = torch.autograd.grad(loss, model.weights)
    assert all(float(gradient.abs().sum()) > 0 for gradient in gradients)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch, loss: float) -> None:
    monkeypatch.setattr(bitwise, "train", lambda *args: Trained((1.0, loss), "d"))
    (found,) = bitwise.run([CPU], ["dense"], 2, 0.0, 1)
    assert found.wrong == (
        f"dense model: the loss of step 1 is {loss}, which no healthy device produces",
    )
    assert not found.digests


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nmodel name : X\n"
            "\nprocessor : 1\nmodel : 9\n",
            ["GenuineIntel", "6", "143"],
        ),
        (
            "vendor_id : A\ncache size : 1024 KB\nflags : fpu avx2 amx_bf16 ibrs\n",
            ["A", "1024KB", blake2b(b"amx_bf16 avx2", digest_size=4).hexdigest()],
        ),
        ("CPU implementer : 0x41\nCPU part : 0xd4f\n", ["0x41", "0xd4f"]),
        ("", []),
    ],
)
def test_kind_of_cpu(tmp_path: Path, text: str, kind: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_kind(tmp_path / "cpuinfo") == kind
