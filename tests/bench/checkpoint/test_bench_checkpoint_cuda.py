"""bench.checkpoint --cuda: what can be seen of it without a GPU. Its cases run on the CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch_forks import TorchForks

pytest.importorskip("torch")

import torch

from bench.checkpoint import __main__ as checkpoint
from bench.checkpoint.cuda import cases as cuda
from bench.checkpoint.work import MB
from bench.common import BenchError, Results
from bench.recovery import __main__ as recovery

pytestmark = pytest.mark.slow

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@no_gpu
@pytest.mark.parametrize("bench", [checkpoint, recovery])
def test_without_a_gpu_it_says_so_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: ModuleType
) -> None:
    file = tmp_path / "found.json"
    assert bench.main(["--cuda", "--quick", "--json", str(file)]) == 2
    said = capsys.readouterr()
    assert "sees no GPU" in said.err and "nothing was measured" in said.err
    assert not said.out and not file.exists()


@pytest.mark.parametrize(
    ("gpus", "nodes", "missing"),
    [
        (1, 1, {"second GPU", "NUMA"}),
        (1, 2, {"second GPU"}),
        (8, 2, set()),
    ],
)
def test_what_one_machine_cannot_show_is_listed(gpus: int, nodes: int, missing: set[str]) -> None:
    found = cuda.unseen("cuda", gpus, nodes)
    text = str(found)
    assert {word for word in ("second GPU", "NUMA") if word in text} == missing
    assert "replicas, InfiniBand" in found


def test_a_state_that_comes_back_otherwise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"step": 8, "crc": 1, "extra": None}, {"step": 8, "crc": 2, "extra": None}])
    monkeypatch.setattr(cuda.Rank, "run", lambda *_: next(answers))
    monkeypatch.setattr(cuda.Rank, "resumes", lambda _: None)
    with pytest.raises(BenchError, match="crc was 1, resumed as 2"):
        cuda.kill_and_resume("plain", "cuda")


def test_when_the_time_is_over_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "BUDGET", 0.0)
    args = checkpoint.parser("checkpoint", ["save"]).parse_args(["--quick"])
    args.size = None
    assert cuda.run(Results("checkpoint", quick=True), args, "cpu") == 0
    assert "not measured: speed_256MB: the time was over" in capsys.readouterr().out


def test_what_was_measured_is_written_before_the_next_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine may be taken away in the middle."""
    results, file = Results("checkpoint", quick=True), tmp_path / "found.json"
    there: list[list[str]] = []

    def fails(_: float) -> None:
        there.append(list(json.loads(file.read_text())["metrics"]))
        raise subprocess.TimeoutExpired("rank", 1.0)

    def works(_: float) -> None:
        results.count("one.identical", 1)

    monkeypatch.setattr(cuda, "cases", lambda *_: {"one": works, "two": fails, "three": fails})
    args = checkpoint.parser("checkpoint", ["save"]).parse_args(["--json", str(file)])
    args.size = None
    assert cuda.run(results, args, "cpu") == 1
    assert there == [["one.identical"]] * 2
    assert "failed: three" in json.loads(file.read_text())["settings"]


def test_all_cases_on_the_cpu(
    torch_forks: TorchForks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda, "CUDA_SIZES", {"1MB": MB})
    monkeypatch.setattr(cuda, "SMALL", MB)
    monkeypatch.setattr(cuda, "LARGE", MB)
    monkeypatch.setattr(cuda, "LAYERS", 2)
    monkeypatch.setattr(cuda, "MANY", 4)
    one_at_a_time = threading.Lock()

    def run_forked(
        argv: Sequence[str], env: dict[str, str], killed: bool = False, limit: float = 0.0
    ) -> Any:
        """Run the module in a fork, like run_json; the processes are many."""
        (_, _, module, *rest) = argv
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        with one_at_a_time:
            fork = torch_forks.start(code, *rest, env=env)
            assert fork.wait() == (-signal.SIGKILL if killed else 0), fork.err()
        return json.loads(fork.out().splitlines()[-1])

    monkeypatch.setattr(cuda, "run_json", run_forked)
    file = tmp_path / "found.json"
    args = checkpoint.parser("checkpoint", ["save"]).parse_args(["--quick", "--json", str(file)])
    args.size = None
    code = cuda.run(Results("checkpoint", quick=True), args, "cpu")
    assert code == 0, capsys.readouterr()
    found = json.loads(file.read_text())
    identical = {name: m["median"] for name, m in found["metrics"].items() if "identical" in name}
    assert identical == {f"cuda_{kind}.identical": 1 for kind in cuda.RESUMED}
    assert {
        "cuda_1MB.counted_s", "cuda_1MB.step_ratio", "cuda_1MB.blocked_s", "cuda_1MB.copy_s",
        "cuda_host_96.save_s", "cuda_host_96.hook_s", "cuda_host_192.blocked_s",
        "cuda_scaler.save_s", "cuda_scaler.hook_s", "cuda_temporary.beside_mib",
    } <= set(found["metrics"])  # fmt: skip
    assert "cuda_1MB.blocked/memcpy" in found["ratios"]
    said = capsys.readouterr().out
    assert "not measured: anything of a GPU" in said
    assert said.index("cuda_scaler.save_s") < said.index(" host_many, ")  # as it goes
