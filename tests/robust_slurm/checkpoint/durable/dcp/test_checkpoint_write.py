"""A rank's part of a durable step: written whole or not at all, without a copy of the data."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import (
    data_parallel,
    private,
    save_snapshot,
    save_world,
    sharded,
)
from durable_tiers import RUN, commit_now, listed, save, tiny
from torch_forks import TorchForks, all_end_well

from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.dcp import write as dcp_write
from robust_slurm.checkpoint.durable.dcp.write import write
from robust_slurm.checkpoint.durable.files import DurableError
from robust_slurm.checkpoint.format import digest as digests


@pytest.mark.parametrize("cut", [data_parallel, sharded])
def test_a_step_of_several_ranks(tmp_path: Path, tier: Path, trained_state: Any, cut: Any) -> None:
    sources = save_world(tmp_path, trained_state, 3, cut)
    for source in sources:
        assert not write(str(source), tier, RUN).already
        assert listed(tier) == []
    done = commit_now(tier, 100, 3)
    assert listed(tier) == [100]
    (found,) = durable.committed(tier)
    assert (found.world, found.bytes, found.attempt) == (3, done.bytes, RUN)
    names = sorted(p.name for p in found.path.iterdir())
    assert names == [
        ".metadata", *(f"{RUN}-{r}_0.distcp" for r in range(3)), f"{RUN}-commit.json",
        *(f"{RUN}-rank-{r}.json" for r in range(3)), "manifest.json",
    ]  # fmt: skip


PEAK_OF_WRITING = """
import sys, torch
import torch.distributed.checkpoint.filesystem as f
from pathlib import Path
from robust_slurm.checkpoint.durable.dcp.write import write
torch.set_num_threads(1)
def kb(name):
    line = [l for l in open("/proc/self/status") if l.startswith(name)][0]
    return int(line.split()[1])
anon = kb("RssAnon")
peak = [anon]
original = f._write_item
def watched(*a, **k):
    out = original(*a, **k); peak.append(kb("RssAnon")); return out
f._write_item = watched
write(sys.argv[1], Path(sys.argv[2]), "x.e0")
assert len(peak) > 8
print(max(peak) - anon)
"""


def test_no_copy_of_the_data_is_made(torch_forks: TorchForks, tmp_path: Path, tier: Path) -> None:
    """torch clones a view of a larger storage before it writes it, and keeps all clones."""
    big = [private(f"model.{i}", torch.ones(1 << 20)) for i in range(8)]
    source = save_snapshot(tmp_path / "own.safetensors", big, {})
    fork = torch_forks.start(PEAK_OF_WRITING, str(source), str(tier))
    all_end_well([fork])
    assert int(fork.out()) < 12 << 10  # kB; the data are 32 MiB


def test_writing_the_same_again_does_nothing(tmp_path: Path, tier: Path) -> None:
    source = tiny(tmp_path / "a.safetensors", 5)
    first = write(str(source), tier, RUN)
    before = {p.name: p.stat().st_mtime_ns for p in durable.step_dir(tier, 5).iterdir()}
    again = write(str(source), tier, RUN)
    assert (first.already, again.already) == (False, True)
    assert {p.name: p.stat().st_mtime_ns for p in durable.step_dir(tier, 5).iterdir()} == before
    assert commit_now(tier, 5).bytes == commit_now(tier, 5).bytes
    assert listed(tier) == [5]


def test_a_part_of_other_content_is_replaced_until_it_is_committed(
    tmp_path: Path, tier: Path
) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, fill=1.0)), tier, RUN)
    other = tiny(tmp_path / "b.safetensors", 5, fill=2.0)
    assert not write(str(other), tier, RUN).already
    commit_now(tier, 5)
    with pytest.raises(DurableError, match="another run under the same name"):
        write(str(tmp_path / "a.safetensors"), tier, RUN)
    assert listed(tier) == [5]


def test_an_unfinished_part_beside_another_attempts_step(tmp_path: Path, tier: Path) -> None:
    save(tier, 5, "77.e0")
    write(str(tiny(tmp_path / "a.safetensors", 5, fill=1.5)), tier, "77.e1")
    assert not write(str(tiny(tmp_path / "a.safetensors", 5, fill=2.5)), tier, "77.e1").already
    commit_now(tier, 5, attempt="77.e1")
    assert listed(tier) == [5]


@pytest.mark.parametrize("lost", ["data", "part"])
def test_a_part_that_was_lost_is_written_again(tmp_path: Path, tier: Path, lost: str) -> None:
    source = str(tiny(tmp_path / "a.safetensors", 5))
    write(source, tier, RUN)
    where = durable.step_dir(tier, 5)
    (where / (f"{RUN}-0_0.distcp" if lost == "data" else f"{RUN}-rank-0.json")).unlink()
    assert not write(source, tier, RUN).already
    commit_now(tier, 5)
    assert listed(tier) == [5]


def test_a_flipped_bit_never_becomes_durable(tmp_path: Path, tier: Path) -> None:
    source = tiny(tmp_path / "a.safetensors", 5)
    with open(source, "rb+") as file:
        good = digests.take(file.fileno(), source.stat().st_size)
        file.seek(-3, 2)
        file.write(b"\x55")
    with pytest.raises(DurableError, match="differs from its digest"):
        write(str(source), tier, RUN, good)
    assert not durable.step_dir(tier, 5).exists()


def test_a_torn_or_overwritten_source(
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = tiny(tmp_path / "torn.safetensors", 5)
    with open(torn, "rb+") as file:
        file.write(bytes(8))
    with pytest.raises(DurableError, match="torn"):
        write(str(torn), tier, RUN)
    with pytest.raises(DurableError, match="gone"):
        write(str(tmp_path / "absent"), tier, RUN)

    source = tiny(tmp_path / "a.safetensors", 6)
    original = dcp_write._write_data

    def slow(*args: Any) -> Any:
        done = original(*args)
        tiny(source, 7)
        return done

    monkeypatch.setattr(dcp_write, "_write_data", slow)
    with pytest.raises(DurableError, match="overwritten"):
        write(str(source), tier, RUN)
    assert not durable.step_dir(tier, 6).exists()


def test_a_full_disk_leaves_no_directory_and_its_numbers_add_up(tmp_path: Path, tier: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tier)], check=True)
    try:
        with pytest.raises(DurableError) as failed:
            write(str(tiny(tmp_path / "a.safetensors", 5)), tier, RUN)
        assert list(tier.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tier)], check=True)
    found = re.search(r"(\S+) MB to write and (\S+) MB to spare, (\S+) MB free, so (\S+) MB are",
                      str(failed.value))  # fmt: skip
    assert found is not None, failed.value
    size, spare, free, missing = map(float, found.groups())
    assert size + spare - free == pytest.approx(missing, abs=1) and missing > 1


def test_a_file_system_that_is_full_in_the_middle(
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes the space after it was found to be enough."""
    monkeypatch.setattr(dcp_write, "_check_room", lambda *_: None)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tier)], check=True)
    try:
        save(tier, 5)
        piece = private("model.w", torch.ones(1 << 20))
        source = save_snapshot(tmp_path / "large.safetensors", [piece], {}, step=9)
        with pytest.raises(DurableError, match=r"(?s)step 9.*(full|quota)"):
            write(str(source), tier, RUN)
        assert not durable.step_dir(tier, 9).exists()
        assert listed(tier) == [5]
        save(tier, 10)
        assert listed(tier) == [5, 10]
    finally:
        subprocess.run(["umount", str(tier)], check=True)
