"""The frozen base of a LoRA crosses the network once, and what is restored is still the newest."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_stores import Proxy, at_port, stores
from waiting import until

from robust_slurm import Checkpointer
from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.format.layout import read_snapshot
from robust_slurm.checkpoint.store.store import Store

CHUNK = 1 << 14


class Layer(torch.nn.Module):
    """A frozen weight, and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(128, 128, bias=False).requires_grad_(False)
        self.down = torch.nn.Linear(128, 1, bias=False)
        self.up = torch.nn.Linear(1, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def merge(weight: torch.Tensor) -> None:
    weight.data.add_(0.25)


def unmerge(weight: torch.Tensor) -> None:
    weight.data.sub_(0.25)


def through_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[5] *= 0.5


def counted(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(weight.roll(1, 0))


def train(weight: torch.Tensor) -> None:
    weight.requires_grad_(True)
    with torch.no_grad():
        weight.mul_(0.99)


def stop_training(weight: torch.Tensor) -> None:
    weight.requires_grad_(False)


Write = Callable[[torch.Tensor], object]
WRITES: dict[str, dict[int, Write]] = {
    "none": {},
    "merge and unmerge": {4: merge, 5: unmerge, 7: merge},
    "numpy": {2: through_numpy, 6: through_numpy},
    "copy_": {3: counted, 6: counted},
    "trained for a while": {3: train, 4: train, 6: stop_training},
}


def has(store: Store, step: int) -> bool:
    return any(held.step == step for held in store.stock())


@pytest.mark.slow
@pytest.mark.parametrize("writes", WRITES.values(), ids=list(WRITES))
def test_each_replica_holds_what_save_found(
    writes: dict[int, Write], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CHUNK", CHUNK)
    for name in [name for name in os.environ if name.startswith(("ROBUST_", "SLURM_"))]:
        monkeypatch.delenv(name)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Layer() for _ in range(16)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    weight = model[9].base.weight  # type: ignore[union-attr]
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        monkeypatch.setenv("ROBUST_CKPT_SOCKET", str(a.socket_path))
        proxy = Proxy(b.port, 1 << 40)
        ckpt = Checkpointer(model=model, optimizer=optimizer)
        ckpt.resume()
        a.place({0: at_port(proxy.port)})
        sent = []
        for step in range(1, 9):
            model(torch.randn(3, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            writes.get(step, lambda _w: None)(weight)  # type: ignore[arg-type]
            before = proxy.passed
            ckpt.save(step)
            until(partial(has, b, step), f"replica of step {step}")
            sent.append(proxy.passed - before)
            (held,) = [h for h in b.stock() if h.step == step]
            path = b.socket_path.parent / held.file
            found = map_file(path, read_snapshot(str(path))[1])
            for name, parameter in model.named_parameters():
                assert torch.equal(found[f"model.{name}"], parameter), (step, name)
        ckpt.close()
        proxy.close()
        base = sum(layer.base.weight.nbytes for layer in model)  # type: ignore[union-attr, misc]
        assert sent[0] > base
        quiet = [n for step, n in enumerate(sent, 1) if step > 1 and not writes]
        # The trained part, a chunk at each end of the frozen one, and the header.
        assert all(n < held.size - base + 2 * CHUNK + 8000 for n in quiet), (sent, held.size, base)
