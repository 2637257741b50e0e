"""NVRx's local checkpoints, made to run on a CPU; the small changes for that are ours.

Imported only where nvidia-resiliency-ext is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (  # type: ignore[import-not-found]
    AsyncCallsQueue,
)
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (  # type: ignore[import-not-found]
    BasicTensorAwareStateDict,
    dict_list_map_inplace,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (  # type: ignore[import-not-found]
    LocalCheckpointManager,
)
from torch._C._distributed_c10d import HashStore

from bench.checkpoint.saving.savers import Saver
from bench.checkpoint.work import Work


def _structure(value: Any) -> Any:
    """New dicts and lists around the same tensors and values."""
    if isinstance(value, dict):
        return {key: _structure(one) for key, one in value.items()}
    return [_structure(one) for one in value] if isinstance(value, list) else value


class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]
    """A state dict whose own refuses tensors that are not on a GPU."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = _structure(state)  # it is changed in place
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        pass

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


class Copied(OnCpu):
    """Copies where a tensor of a GPU would be brought to the host."""

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        dict_list_map_inplace(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, self.state_dict
        )


class NvrxSync(Saver):
    """LocalCheckpointManager.save, synchronous."""

    note = "LocalCheckpointManager in /dev/shm, CPU shim of ours, synchronous"

    def __init__(self, work: Work, directory: Path) -> None:
        super().__init__(work, directory)
        store = HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._manager = LocalCheckpointManager(directory)

    def save(self, step: int) -> None:
        self._manager.save(OnCpu(self.work.state()), step)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class NvrxAsync(NvrxSync):
    """The same in the background, from a copy that is made in save."""

    note = "LocalCheckpointManager in /dev/shm, CPU shim of ours, asynchronous: forked writer"

    def __init__(self, work: Work, directory: Path) -> None:
        super().__init__(work, directory)
        torch.cuda.synchronize = lambda *_: None
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, step: int) -> None:
        self.settle()
        request = self._manager.save(Copied(self.work.state()), step, is_async=True)
        self._queue.schedule_async_request(request)

    def settle(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def close(self) -> None:
        self.settle()
        self._queue.close()
        super().close()
