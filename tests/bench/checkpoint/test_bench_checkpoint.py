"""bench.checkpoint measures what it says: small states, few runs, no timing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch_forks import TorchForks

pytest.importorskip("torch")

from bench.checkpoint import __main__ as checkpoint
from bench.checkpoint import overhead, restore
from bench.checkpoint.nodes import run_json, scratch
from bench.checkpoint.saving import peers
from bench.checkpoint.work import MB, Memcpy, Work
from bench.common import BenchError, Results
from robust_slurm.checkpoint.planning import interval

pytestmark = pytest.mark.slow

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
SAVE = ("blocked_s", "step_s", "plain_step_s", "step_ratio", "memcpy_s")


@pytest.mark.parametrize("wanted", [2 * MB, 16 * MB])
def test_the_state_has_the_wanted_size(wanted: int) -> None:
    work = Work(wanted)
    work.step()
    assert 0.7 * wanted < work.nbytes < 1.3 * wanted
    before = work.crc()
    assert work.crc() == before
    work.step()
    assert work.crc() != before


def test_memcpy_copies() -> None:
    memcpy = Memcpy(MB)
    memcpy._buffers[0][:3] = b"abc"
    assert memcpy.seconds() > 0
    assert memcpy._buffers[1][:3] == b"abc"
    assert memcpy._buffers[1][3:] == bytes([1]) * (MB - 3)


@needs_root
def test_all_cases(
    torch_forks: TorchForks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkpoint, "SIZES", {"2MB": 2 * MB})

    def run_forked(argv: Sequence[str], env: dict[str, str], killed: bool = False) -> Any:
        """Run the module in a fork, like run_json; the processes are many."""
        (python, option, module, *rest) = argv
        assert (python, option) == (sys.executable, "-m")
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        fork = torch_forks.start(code, *rest, env=env)
        assert fork.wait() == (-signal.SIGKILL if killed else 0), fork.err()
        return json.loads(fork.out().splitlines()[-1])

    for module in (checkpoint, restore):
        monkeypatch.setattr(module, "run_json", run_forked)
    file = tmp_path / "found.json"
    cases = ["--case", "save", "--case", "restore"]
    code = checkpoint.main(["--runs", "1", "--json", str(file), *cases])
    assert code == 0, capsys.readouterr().err
    found = json.loads(file.read_text())
    names = set(found["metrics"])
    for saver in ("save", "save_replica", "save_busy", "torch_save", "dcp_async"):
        assert {f"{saver}_2MB.{phase}" for phase in SAVE} <= names
        assert f"{saver}_2MB.blocked/memcpy" in found["ratios"]
    assert {"save_2MB.copy_s", "memcpy_2MB.s", "restore_own_2MB.s", "restore_peer_2MB.s"} <= names
    assert {"raw_tcp_2MB.s", "raw_tcp_2MB.gb_per_s", "raw_tcp_kept_2MB.s", "replica_2MB.s"} <= names
    assert found["machine"]["torch"]


@needs_root
def test_the_interval_of_a_slow_link_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "WIDEN", 0.0)
    for name, value in (("CALM", 0.0), ("STATE", 2 * MB), ("STEP", 0.02)):
        monkeypatch.setattr(overhead, name, value)
    results = Results("checkpoint", quick=True, runs=1)
    overhead.overhead(results)
    assert results.metrics["overhead_widened.every"].median > 1
    assert results.metrics["overhead_every_step.step_ratio"].n == 1
    assert results.metrics["overhead_widened.step_ratio"].n == 1
    assert "every step" not in str(results.settings["overhead"])


def test_a_process_of_the_bench_prints_what_it_found_last() -> None:
    def ran(code: str, killed: bool = False) -> dict[str, Any]:
        return run_json([sys.executable, "-c", code], {"GIVEN": "5"}, killed)

    prints = (
        "import os, signal; print('hello'); print('{\"a\":', os.environ['GIVEN'], '}', flush=True)"
    )
    kills = "; os.kill(os.getpid(), signal.SIGKILL)"
    assert ran(prints) == ran(prints + kills, True) == {"a": 5}
    for code, killed in ((prints + kills, False), (prints, True), ("pass", False)):
        with pytest.raises(BenchError, match="ended with"):
            ran(code, killed)
    with pytest.raises(BenchError, match="no such luck"):
        ran("raise SystemExit('no such luck')")


@pytest.mark.parametrize("wrong", [{"step": 3, "crc": 5}, {"step": 4, "crc": 6}])
def test_a_wrong_restore_is_no_result(wrong: dict[str, Any]) -> None:
    restore.same({"step": 4, "crc": 5}, {"step": 4, "crc": 5})
    with pytest.raises(BenchError, match="restored"):
        restore.same({"step": 4, "crc": 5}, wrong)


def test_a_size_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "available", lambda: checkpoint.SIZES["1GB"])
    results = Results("checkpoint", quick=True)
    bench = checkpoint.Bench(results, ["64MB", "1GB"], None)
    assert bench.room("save", "64MB") and not bench.room("save", "1GB")
    assert "are available" in str(results.settings["not measured: save_1GB"])


def test_what_cannot_be_measured_is_told_and_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = checkpoint.Bench(Results("checkpoint", quick=True), ["64MB"], None)

    def fails() -> None:
        raise BenchError("no such thing")

    bench.attempt("some_case", fails)
    assert bench.failed == ["some_case"] and not bench.results.metrics
    assert "some_case: no such thing" in capsys.readouterr().err


def test_peers_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[tuple[str, ...]] = []

    def run(self: peers.Peers, *argv: str) -> str:
        asked.append(argv)
        if "nvidia-resiliency-ext" in argv:
            raise subprocess.CalledProcessError(1, argv, stderr="no wheel for this machine")
        if argv[2:] == ("import bench.checkpoint.saving.nvrx",):
            raise subprocess.CalledProcessError(1, argv, stderr="ModuleNotFoundError: nvrx")
        return f"{tmp_path}\n" if "sysconfig" in argv[-1] else "1.2.3\n"

    monkeypatch.setattr(peers.Peers, "_run", run)
    found = peers.Peers()
    assert found.versions == {"dlrover": "1.2.3"}
    assert found.savers() == ["dlrover"]
    assert "no wheel for this machine" in found.missing["nvidia-resiliency-ext"]
    assert asked
    found.python.parent.mkdir(parents=True)
    found.python.touch()  # made by another checkout, which is gone
    torch_of = tmp_path / "zz-bench.pth"
    torch_of.write_text("/gone\n")
    peers.Peers()
    assert torch_of.read_text().strip() == sysconfig.get_paths()["purelib"]


def test_scratch_goes_away() -> None:
    with scratch() as directory:
        (directory / "file").write_bytes(b"x")
    assert not directory.exists()
