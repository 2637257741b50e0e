"""Changes of ``extra`` after save() are named where no optimizer is seen to step in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed_training import fake_store
from fake_checkpoint_store import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from robust_slurm import Checkpointer, heartbeat
from robust_slurm.checkpoint.copying.guard import CAREFUL

NAMES = ("schedule", "average", "tokens")
STEPS = CAREFUL + 5


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


class Net(torch.nn.Sequential):
    """A model of the script's own, which torch.compile takes whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(
            torch.nn.functional.linear(x, self[0].weight, self[0].bias),
            self[1].weight,
            self[1].bias,
        )


class Script:
    """A training with all that a script changes once a step besides its weights."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.ckpt = Checkpointer(
            model=self.model,
            optimizer=self.optimizer,
            extra={"schedule": self.schedule, "average": self.average, "tokens": 0},
        )
        self.ckpt.resume()

    def backward(self) -> None:
        self.model(torch.randn(3, 6)).square().mean().backward()

    def replay(self) -> None:
        """Step as a CUDA graph does: no hook sees it, and no version counts it."""
        for p in self.model.parameters():
            assert p.grad is not None
            p.detach().numpy()[...] -= 0.01 * p.grad.numpy()
            p.grad = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self, *names: str) -> None:
        for name in names:
            if name == "schedule":
                self.schedule.step()
            elif name == "average":
                self.average.update_parameters(self.model)
            else:
                self.ckpt.extra["tokens"] += 3

    def evaluate(self) -> None:
        """Generate with the average, then with other weights for a moment, and measure a loss."""
        with torch.no_grad():
            self.average(self.model(torch.randn(2, 6)))
            kept = [p.clone() for p in self.average.parameters()]
            for p in self.average.parameters():
                p.zero_()
            self.model.eval()
            self.model(torch.randn(2, 6)).mean()
            self.model.train()
            for p, was in zip(self.average.parameters(), kept, strict=True):
                p.copy_(was)
        self.model(torch.randn(2, 6)).mean()  # a forward pass for its loss alone


def named(said: str) -> set[str]:
    lines = [line for line in said.splitlines() if "and the next backward pass" in line]
    return {name for name in NAMES if any(f"extra.{name}" in line for line in lines)}


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_after_save_is_named_at_the_next_backward_pass(
    store: FakeStore, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    for number in range(1, 3):
        script.backward()
        script.replay()
        script.finish(*(each for each in NAMES if each != name))
        script.ckpt.save(number)
        script.finish(name)
    script.evaluate()
    assert named(capfd.readouterr().err) == set()
    script.backward()  # a crash may follow at once
    assert named(capfd.readouterr().err) == {name}
    script.ckpt.close()


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_after_a_save_between_two_during_accumulation_is_named(
    store: FakeStore, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    for number in range(1, 6):
        script.backward()
        if number % 2 == 0:
            script.step()
        script.ckpt.save(number)
        if number % 2 == 0:
            script.finish(name)
    script.ckpt.close()
    assert named(capfd.readouterr().err) == {name}


@pytest.mark.parametrize("way", ["replayed", "compiled", "accumulated", "scaled", "stepped"])
def test_evaluation_between_save_and_the_next_step_is_met_with_silence(
    store: FakeStore, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    if way == "compiled":
        script.model.compile(backend="eager", fullgraph=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(1, STEPS):
        if way == "scaled":
            factor = 1e39 if number in (2, 3, 6) else 1.0
            loss = script.model(torch.randn(3, 6)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(script.optimizer)
            scaler.update()
            script.optimizer.zero_grad()
        else:
            script.backward()
            script.backward()
            if way in ("replayed", "compiled"):
                script.replay()
            elif number % 2 == 0 or way == "stepped":
                script.step()
        script.finish(*NAMES)
        script.ckpt.save(number)
        script.evaluate()
    script.ckpt.close()
    said = capfd.readouterr().err
    assert "extra." not in said, said
    assert ("seen to step" in said) == (way in ("replayed", "compiled"))


def test_close_takes_the_hooks_away(store: FakeStore) -> None:
    script = Script()
    for number in range(1, 4):
        script.backward()
        script.replay()
        script.ckpt.save(number)
    hooks = [p._post_accumulate_grad_hooks for p in script.model.parameters()]
    assert any(hooks)
    script.ckpt.close()
    assert not any(hooks)


def test_a_loop_whose_optimizer_is_seen_gets_no_hook(store: FakeStore) -> None:
    script = Script()
    for number in range(1, STEPS):
        script.backward()
        script.step()
        script.ckpt.save(number)
        assert not any(p._post_accumulate_grad_hooks for p in script.model.parameters())
    script.ckpt.close()


class Total:
    """A metric of the script's own, whose state_dict() may talk to other ranks."""

    asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"total": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Gathered(torch.nn.Linear):
    """A module that may talk to other ranks when its state is asked for."""

    asked = 0

    def get_extra_state(self) -> int:
        self.asked += 1
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize("made", [Total, lambda: Gathered(2, 2)])
def test_no_code_of_the_script_runs_in_a_backward_pass(
    store: FakeStore, made: Callable[[], Total | Gathered]
) -> None:
    script, own = Script(), made()
    script.ckpt.close()
    ckpt = Checkpointer(model=script.model, optimizer=script.optimizer, extra={"own": own})
    ckpt.resume()
    for number in range(1, STEPS):
        asked = own.asked
        script.backward()
        assert own.asked == asked
        script.replay()
        ckpt.save(number)
    assert own.asked > 0
    ckpt.close()


def test_a_step_left_out_for_its_loss_is_compared_with_no_older_save(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    for number in range(1, STEPS):
        script.backward()
        monkeypatch.setattr(heartbeat, "_nan", number == 3)
        if number != 3:  # a GradScaler leaves that one out
            script.step()
        script.finish(*NAMES)
        script.ckpt.save(number)
    script.ckpt.close()
    assert "extra." not in capfd.readouterr().err


def test_a_step_that_is_not_saved_is_compared_with_no_older_save(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    store.welcome["every"] = 5
    script = Script()
    parameters = [*script.model.parameters()]
    for number in range(1, 40):
        if number % 15 == 0:
            script.backward()
            script.step()
        else:  # no hook sees the backward pass of a CUDA graph
            loss = script.model(torch.randn(3, 6)).square().mean()
            found = torch.autograd.grad(loss, parameters)
            for p, gradient in zip(parameters, found, strict=True):
                p.grad = gradient
            script.replay()
        script.finish(*NAMES)
        script.ckpt.save(number)
    script.ckpt.close()
    assert "extra." not in capfd.readouterr().err


def test_an_optimizer_may_step_inside_of_the_backward_pass_of_fsdp2(store: FakeStore) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        number = 0

        def step(p: torch.nn.Parameter) -> None:
            if number % 2 == 0:
                optimizers[p].step()
                optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        ckpt = Checkpointer(model=model, optimizer=[*optimizers.values()], extra={"n": 0})
        ckpt.resume()
        for number in range(1, 7):
            model(torch.randn(3, 6)).square().mean().backward()
            ckpt.save(number)
        ckpt.close()
    finally:
        dist.destroy_process_group()
