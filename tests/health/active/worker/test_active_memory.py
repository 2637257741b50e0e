"""Memory that does not keep what was written; how much of it is tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from health.active.worker import memory
from health.active.worker.device import WorkerDevice
from health.active.worker.links import run as links
from health.active.worker.memory import MIB, PATTERNS, Pattern

CPU = WorkerDevice("cpu", "cpu")
Fill = Callable[[Sequence[torch.Tensor], Pattern], None]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory.CPU_MOST, "quick", 24 * MIB)


def damage(monkeypatch: pytest.MonkeyPatch, done: Fill) -> None:
    real = memory.fill

    def fill(chunks: Sequence[torch.Tensor], pattern: Pattern) -> None:
        real(chunks, pattern)
        done(chunks, pattern)

    monkeypatch.setattr(memory, "fill", fill)


def test_sound_memory_passes() -> None:
    (found,) = memory.run([CPU], "quick", 0.3)
    assert (found.wrong, found.error) == ((), "")
    assert found.values["covered_bytes"] == 24 * MIB
    assert 0 < found.values["covered_share"] < 0.1
    assert found.values["memory_gbps"] > 0
    assert found.values["patterns"] >= 1


def test_a_flipped_bit_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(chunks: Sequence[torch.Tensor], pattern: Pattern) -> None:
        chunks[0][1234567] ^= 1 << 17

    damage(monkeypatch, flip)
    (found,) = memory.run([CPU], "quick", 0.0)
    (line,) = found.wrong
    assert f"pattern own address: at offset {1234567 * 8} must be" in line
    assert f"{1234567:#018x}, is {1234567 ^ 1 << 17:#018x} (1 bits differ)" in line


def test_a_write_that_went_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def alias(chunks: Sequence[torch.Tensor], pattern: Pattern) -> None:
        chunks[0][:100] = chunks[0][1000:1100]  # an address line that is stuck

    damage(monkeypatch, alias)
    (found,) = memory.run([CPU], "quick", 0.0)
    assert "at offset 0 must be 0x0000000000000000, is 0x00000000000003e8" in found.wrong[0]
    assert "99 more words" in found.wrong[0]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
@pytest.mark.parametrize("bit", [0, 63])
def test_every_pattern_shows_a_bit_that_is_not_kept(pattern: Pattern, bit: int) -> None:
    chunks = [torch.empty(MIB, dtype=torch.int64) for _ in range(2)]
    memory.fill(chunks, pattern)
    assert memory._read(chunks, pattern) == []
    chunks[1][-1] ^= -(1 << 63) if bit == 63 else 1
    (line,) = memory._read(chunks, pattern)
    assert f"at offset {(2 * MIB - 1) * 8} " in line


def test_each_bit_is_written_as_0_and_as_1() -> None:
    words = [pattern.word for pattern in PATTERNS if not pattern.address]
    for bit in range(64):
        assert {word >> bit & 1 for word in words} == {0, 1}


def test_no_memory_is_an_error_and_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", none)
    (found,) = memory.run([CPU], "quick", 0.1)
    assert found.wrong == ()
    assert "no memory could be allocated" in found.error


@pytest.mark.parametrize(("cuda", "times"), [(False, 1), (True, memory.AT_ONCE_GPU)])
def test_a_gpus_copies_are_timed_together(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, times: int
) -> None:
    asked: list[int] = []

    def timed(self: WorkerDevice, work: Callable[[], object], times: int = 1) -> float:
        asked.append(times)
        work()
        return 1.0

    monkeypatch.setattr(WorkerDevice, "timed", timed)
    monkeypatch.setattr(WorkerDevice, "cuda", cuda)
    gbps, wrong = memory._bandwidth(CPU, torch.zeros(MIB, dtype=torch.int64))
    assert asked == [times] * memory.COPIES and not wrong
    assert gbps == pytest.approx(MIB * 8 / 1e9)


def test_links_need_cuda() -> None:
    (found,) = links([CPU], 1.0, 1)
    assert "needs CUDA" in found.error
    assert not found.wrong
