"""The no-code-change hook, in real interpreters and with real torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from robust_slurm.auto import HOOK_DIR
from robust_slurm.record import Beat, BeatReader, record_path, scan

pytestmark = pytest.mark.slow

PACKAGE_PARENT = str(Path(HOOK_DIR).parent.parent)


def run(
    args: list[str], directory: Path, *, path: str = "", ok: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a user's Python with the hook in front of its PYTHONPATH, as the shim does."""
    full = {k: v for k, v in os.environ.items() if not k.startswith(("ROBUST_", "SLURM_", "RANK"))}
    full |= {"ROBUST_BEAT_DIR": str(directory), "PYTHONPATH": HOOK_DIR + path} | env
    done = subprocess.run(
        [sys.executable, *args],
        env=full, capture_output=True, text=True, timeout=200, check=False,
        cwd=directory,
    )  # fmt: skip
    assert not ok or done.returncode == 0, done.stderr
    return done


def read(directory: Path, local_rank: int = 0) -> Beat:
    beat = BeatReader(record_path(str(directory), 0, local_rank)).read()
    assert beat is not None
    return beat


def test_hook_leaves_only_finders_behind(tmp_path: Path) -> None:
    code = f"import sys; print({HOOK_DIR!r} in sys.path, len(sys.meta_path), sys.path[0] == '')"
    plain = run(["-c", code], tmp_path, PYTHONPATH="").stdout.split()
    hooked = run(["-c", code], tmp_path).stdout.split()
    assert plain == ["False", plain[1], "True"]
    assert hooked == ["False", str(int(plain[1]) + 2), "True"]
    off = run(["-c", code], tmp_path, ROBUST_AUTO="0").stdout.split()
    assert off == ["False", str(int(plain[1]) + 1), "True"]


def test_hook_imports_nothing(tmp_path: Path) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    plain = set(run(["-c", code], tmp_path, PYTHONPATH="").stdout.split())
    hooked = set(run(["-c", code], tmp_path).stdout.split())
    assert hooked - plain <= {"sitecustomize", "__future__"}


def test_library_is_found_without_being_installed_and_nothing_else_is(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import robust_slurm, robust_slurm.heartbeat; robust_slurm.beat(3)\n"
        "import importlib.util as u; print(u.find_spec('msgspec'), u.find_spec('srun_wrapper'))"
    )
    done = run(["-c", code], tmp_path, path="")
    assert done.stdout.split() == ["None", "None"]
    assert read(tmp_path).step == 3


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("MINE = 1\nprint('site')\n")
    done = run(
        ["-c", "import sitecustomize as s; print(s.MINE)"], tmp_path, path=f":{tmp_path}/site"
    )
    assert done.stdout.split() == ["site", "1"]
    assert done.stderr == ""


@pytest.mark.parametrize("body", ["1/0", "import no_such_module_at_all", "raise SystemExit(3)"])
def test_a_failing_sitecustomize_fails_as_without_us(tmp_path: Path, body: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(body + "\n")
    script = ["-c", "print('ran')"]
    plain = run(script, tmp_path, ok=False, PYTHONPATH=f"{tmp_path}/site")
    hooked = run(script, tmp_path, ok=False, path=f":{tmp_path}/site")
    assert (hooked.returncode, hooked.stdout) == (plain.returncode, plain.stdout)
    assert hooked.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


TORCH = """
import gc, os, sys, torch
from torch.optim import SGD, Adam, AdamW
from robust_slurm.record import BeatReader, record_path
reader = BeatReader(record_path(os.environ["ROBUST_BEAT_DIR"], 0, 0))

def train(make, steps):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    before = reader.read()
    for _ in range(steps):
        weight.grad = torch.ones(3)
        optimizer.step()
    after = reader.read()
    del optimizer
    gc.collect()
    return after.step - (before.step or 0 if before else 0)

class Mine(SGD):
    def step(self, closure=None):
        return super().step(closure)
"""


def test_optimizer_steps_are_counted_whatever_the_optimizer(tmp_path: Path) -> None:
    done = run(
        ["-c", TORCH + """
print(train(AdamW, 3), train(lambda p: SGD(p, lr=0.1), 2), train(Mine, 2),
      train(lambda p: AdamW(p, foreach=True), 2), train(lambda p: AdamW(p, fused=True), 2))
assert reader.read().source == "auto" and reader.read().loss is None

a, b = (torch.nn.Parameter(torch.ones(1)) for _ in "ab")
generator, critic = Adam([a]), Adam([b])
start = reader.read().beats
for _ in range(4):            # a GAN: two optimizers, one step of training
    a.grad = b.grad = torch.ones(1)
    generator.step(); critic.step()
print(reader.read().beats - start)
del generator; gc.collect()
critic.step()                 # the first one is gone: the next one counts
print(reader.read().beats - start)
del critic; gc.collect()

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print(train(lambda p: ZeroRedundancyOptimizer(p, optimizer_class=AdamW), 3))
dist.destroy_process_group()

step = reader.read().step
import robust_slurm
robust_slurm.beat(1000, loss=torch.tensor(0.5))
train(AdamW, 3)
print(step, reader.read().step, reader.read().source, reader.read().loss)
"""],
        tmp_path,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "3 2 2 2 2"
    assert lines[1:3] == ["4", "5"]
    assert lines[3] == "3"
    assert lines[4] == "19 1000 explicit 0.5"
    assert "robust-slurm" not in done.stderr


def test_without_auto_torch_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import torch.optim.optimizer as o, sys\n"
        "print(len(o._global_optimizer_post_hooks), 'robust_slurm' in sys.modules)"
    )
    assert run(["-c", code], tmp_path, ROBUST_AUTO="0").stdout.split() == ["0", "False"]
    assert list(tmp_path.iterdir()) == []


def test_children_of_torchrun_are_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nw = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([w])\n"
        "for _ in range(4):\n    w.grad = torch.ones(1); o.step()\n"
    )
    beats = tmp_path / "beats"
    beats.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*torchrun, str(script)], beats, LOCAL_RANK="0", RANK="0")
    assert sorted(scan(str(beats), 0)) == [0, 1]
    assert [(read(beats, n).step, read(beats, n).rank) for n in (0, 1)] == [(4, 0), (4, 1)]


def test_a_torch_without_the_hook_still_trains(tmp_path: Path) -> None:
    for name in ("torch", "torch/optim"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch/optim/optimizer.py").write_text("loaded = True\n")
    code = (
        "import torch.optim.optimizer as o; print(o.loaded, type(o.__loader__).__name__,\n"
        "'exec_module' in vars(o.__loader__))"
    )
    done = run(["-c", code], tmp_path, path=f":{tmp_path}")
    assert done.stdout.split() == ["True", "SourceFileLoader", "False"]
    assert done.stderr.count("\n") == 1
    assert "automatic step counting is off" in done.stderr
