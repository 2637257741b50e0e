"""The examples: the two job scripts, and the training that must resume exactly."""

import importlib.util
import json
import os
import shutil
import socket
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
from torch_forks import Fork, TorchForks, all_end_well
from waiting import until

from lab import curves
from robust_slurm.checkpoint.durable import tier

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
TRAIN = EXAMPLES / "train_lm.py"

# -- job scripts ------------------------------------------------------------------------------


def render(**values: object) -> str:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(REPOSITORY / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return env.get_template("sbatch.j2").render(**values)


def test_job_scripts_differ_in_the_launcher_only() -> None:
    before = (EXAMPLES / "job-before.sbatch").read_text().splitlines()
    after = (EXAMPLES / "job-after.sbatch").read_text().splitlines()
    assert len(before) == len(after)
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 1
    (old, new), *_ = changed
    assert old.startswith("srun ")
    assert new == f"robust-{old}"
    assert "robust" not in "\n".join(before)
    assert "#SBATCH --no-kill" in before


@pytest.mark.parametrize(("name", "launcher"), [("before", "srun"), ("after", "robust-srun")])
def test_job_scripts_are_the_template(name: str, launcher: str) -> None:
    assert (EXAMPLES / f"job-{name}.sbatch").read_text() == render(launcher=launcher)


def test_template_options() -> None:
    text = render(nodes=2, gpus_per_node=8, tasks_per_node=8, partition="big", command="./run.sh")
    for line in ("--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=8", "--partition=big"):
        assert f"\n#SBATCH {line}\n" in text
    assert text.endswith("\nrobust-srun ./run.sh\n")


# -- curves -----------------------------------------------------------------------------------


def curve(losses: dict[int, float]) -> dict[int, curves.Point]:
    return {step: curves.Point(loss, 1, 0.0) for step, loss in losses.items()}


def test_curve_is_read_and_its_torn_line_left_out() -> None:
    text = '{"step": 1, "loss": 2.5, "epoch": 1, "time": 9}\n{"step": 2, "lo'
    assert curves.parse(text) == {1: curves.Point(2.5, 1, 9.0)}
    with pytest.raises(ValueError):
        curves.parse("nonsense\n")


@pytest.mark.parametrize(
    ("one", "other", "gap"),
    [
        ({1: 1.0, 2: 0.5}, {1: 1.0, 2: 0.5}, 0.0),
        ({1: 1.0, 2: 0.5}, {1: 1.0, 2: 0.25}, 0.25),
        ({1: 1.0, 2: 0.5}, {1: 1.0}, float("inf")),
        ({}, {}, float("inf")),
    ],
)
def test_difference(one: dict[int, float], other: dict[int, float], gap: float) -> None:
    assert curves.difference(curve(one), curve(other)) == gap


def test_chart_and_choice() -> None:
    assert curves.chart([3.0, 2.0, 1.0, 0.0], 0.0, 3.0) == "█▆▃▁"
    assert curves.chart([1.0, 1.0], 1.0, 1.0) == "▁▁"
    assert curves.columns(range(1, 101), 3) == [1, 51, 100]
    assert curves.choose(range(1, 101), (47, 500), 3) == [1, 47, 51, 100]
    assert curves.choose([], (1,)) == []


# -- training ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train_lm() -> ModuleType:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("train_lm", TRAIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        import gc

        gc.enable()  # the script turns it off while it starts
    return module


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[3-5,9],m1", "n3"),
        ("gpu-[007,012]", "gpu-007"),
        ("b,a[1-2]", "b"),
        ("localhost", "localhost"),
    ],
)
def test_first_host(train_lm: ModuleType, hosts: str, first: str) -> None:
    assert train_lm.first_host(hosts) == first


def test_batch_follows_from_seed_and_step(train_lm: ModuleType) -> None:
    import argparse

    import torch

    args = argparse.Namespace(seed=3, batch=4, context=8)
    text = torch.arange(1000)
    whole, targets = train_lm.batch_of(
        text, argparse.Namespace(seed=3, batch=8, context=8), 5, 0, 1
    )
    assert torch.equal(targets, whole + 1)
    shares = [train_lm.batch_of(text, args, 5, rank, 2)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(shares), whole)
    assert not torch.equal(train_lm.batch_of(text, args, 6, 0, 2)[0], shares[0])


RANKS = 3  # with two the order of a sum could not matter
EVERY = 4  # steps between checkpoints
# Arguments: the script, and its own. Saving does not wait for the disk: here each checkpoint is
# waited for in the step after it, in which the ranks then stop for good if HOLD says so.
_RANK = f"""
import os, runpy, sys, time
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import robust_slurm
out = sys.argv[sys.argv.index("--out") + 1] if "--out" in sys.argv else ""
beat = robust_slurm.beat
def beat_and_wait(step, **more):
    beat(step, **more)
    saved = step - 1
    if saved % {EVERY} == 0 and saved:
        while not os.path.exists(f"{{out}}/checkpoints/step-{{saved:08d}}/manifest.json"):
            time.sleep(0.02)
    while step == int(os.environ.get("HOLD", 0)):
        time.sleep(1)
if out:
    robust_slurm.beat = beat_and_wait
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # to take torch apart takes 2 s more
"""


def start(forks: TorchForks, ranks: int, env: dict[str, str], *words: str) -> list[Fork]:
    """Start an example's ranks, where torch is imported already."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        forks.start(_RANK, *words, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def train(forks: TorchForks, out: Path, env: dict[str, str]) -> list[Fork]:
    words = [str(TRAIN), "--out", str(out), "--steps", "16", "--save-every", str(EVERY)]
    return start(forks, RANKS, env, *words)


def losses(out: Path) -> dict[int, float]:
    path = out / "loss.jsonl"
    points = curves.parse(path.read_text()) if path.exists() else {}
    return {step: point.loss for step, point in points.items()}


def durable_steps(out: Path) -> list[int]:
    """Read the steps of the committed checkpoints."""
    return [each.step for each in tier.committed(out / "checkpoints")]


def test_stopped_training_goes_on_with_the_same_losses(
    tmp_path: Path, torch_forks: TorchForks
) -> None:
    """Killed in step 12, it does the three steps after its last checkpoint once more."""
    pytest.importorskip("torch")
    out = tmp_path / "out"
    first = train(torch_forks, out, {"HOLD": "12"})
    try:
        until(lambda: max(losses(out), default=0) >= 11, "step 11", 60)
    finally:
        for rank in first:
            rank.kill()
    assert "robust-slurm" not in first[0].err()
    expected = losses(out)
    assert list(expected) == list(range(1, 12))
    assert durable_steps(out) == [4, 8]
    # A newer checkpoint that is broken, one that was not completed, a torn line: as a crash may do.
    newest, broken = (tier.step_dir(out / "checkpoints", step) for step in (8, 99))
    shutil.copytree(newest, broken)
    manifest = broken / tier.MANIFEST
    manifest.write_text(manifest.read_text().replace('"step":8,', '"step":99,'))
    for data in broken.glob("*.distcp"):
        os.truncate(data, 1000)
    shutil.copytree(newest, tier.step_dir(out / "checkpoints", 98))
    (tier.step_dir(out / "checkpoints", 98) / tier.MANIFEST).unlink()
    assert durable_steps(out) == [4, 8, 99]
    with (out / "loss.jsonl").open("a") as file:
        file.write('{"step": 1')

    env = {"ROBUST_EPOCH": "2", "ROBUST_RESTART_REASON": "rank_exit: a test"}
    again = train(torch_forks, out, env)
    all_end_well(again, 120)
    printed, complaints = again[0].out(), again[0].err()
    assert "resumed after step 8 (epoch 2, restarted: rank_exit: a test)" in printed
    assert "step 99 is skipped" in complaints
    found = losses(out)
    assert {step: found[step] for step in expected} == expected
    assert f"step 16 loss {found[16]:.6f}" in printed
    rows = [json.loads(line) for line in (out / "loss.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert [row["epoch"] for row in rows] == [0] * 8 + [2] * 8


@pytest.mark.parametrize(
    ("name", "more"),
    [("fsdp2.py", []), ("train_lm.py", ["--plan=speeches:plan", "--save-every=2"])],
)
def test_example_goes_on_where_it_was_stopped(
    tmp_path: Path, torch_forks: TorchForks, name: str, more: list[str]
) -> None:
    def run(out: Path) -> list[str]:
        words = [str(EXAMPLES / name), "--steps=6", f"--out={out}", *more]
        ranks = start(torch_forks, 2, {"ROBUST_CHECKPOINT_EVERY": "2"}, *words)
        all_end_well(ranks)
        return [line for line in ranks[0].out().splitlines() if line.startswith("step ")]

    for attempt in range(10):  # the last step is always on disk; others not while the writer starts
        out = tmp_path / str(attempt)
        whole = run(out)
        assert len(whole) == 6
        shutil.rmtree(tier.step_dir(out / "checkpoints", 6))  # as if stopped in step 5
        if before := durable_steps(out):
            break
    assert before[-1] in (2, 4)
    assert run(out) == whole[before[-1] :]
