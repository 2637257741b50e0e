"""Ways to save the state at every step; each says in ``note`` how it was set up, at its best here.

``save`` is called after every optimizer step. What must not go on before the next optimizer step
waits in ``before_step``. ``settle`` waits until all that was saved is complete; it is not timed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from bench.checkpoint.work import Work


class Saver:
    """One way to save ``work`` below ``directory``, which is in memory (/dev/shm)."""

    note = ""
    taken = ""
    """After ``close``: how many calls of ``save`` took a snapshot, where not all need to."""

    def __init__(self, work: Work, directory: Path) -> None:
        self.work = work
        self.directory = directory

    def save(self, step: int) -> None:
        """Save, or begin to; this one saves nothing."""

    def before_step(self) -> None:
        """Wait for what reads the live state."""

    def settle(self) -> None:
        """Wait for everything that goes on in the background."""

    def close(self) -> None:
        """End threads and processes, remove what lies in memory."""

    def extra(self) -> dict[str, float]:
        """Return the way's own numbers of its last save, by metric."""
        return {}


class TorchSave(Saver):
    """torch.save to a file in memory."""

    note = "torch.save to /dev/shm, then rename"

    def save(self, step: int) -> None:
        path = self.directory / "state.pt"
        torch.save(self.work.state(), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


class DcpAsync(Saver):
    """torch.distributed.checkpoint.async_save, staged in its own thread beside the next step."""

    note = (
        "dcp.async_save to /dev/shm, thread, one kept DefaultStager with asynchronous staging "
        "(awaited before the next optimizer step), no_dist"
    )

    def __init__(self, work: Work, directory: Path) -> None:
        super().__init__(work, directory)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Pinned memory and non-blocking copies need a GPU; shared memory is for process mode.
        self._stager = DefaultStager(StagingOptions(False, False, True, False))
        self._going: Any = None

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.settle()
        self._going = async_save(
            self.work.state(),
            storage_writer=FileSystemWriter(
                self.directory / str(step % 2), sync_files=False, overwrite=True
            ),
            async_stager=self._stager,
            no_dist=True,
        )

    def before_step(self) -> None:
        if self._going is not None:
            self._going.staging_completion.result()

    def settle(self) -> None:
        if self._going is not None:
            self._going.upload_completion.result()
            self._going = None

    def close(self) -> None:
        self.settle()
        self._stager.close()


class DLRover(Saver):
    """DLRover's flash checkpoint, memory only: a copy to shared memory inside save."""

    note = "DdpCheckpointer.save_checkpoint(StorageType.MEMORY), saver process started by itself"

    def __init__(self, work: Work, directory: Path) -> None:
        super().__init__(work, directory)
        # Its sockets and its segment have fixed names, told apart by this.
        self._name = os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}"
        os.environ["DLROVER_LOG_LEVEL"] = "WARNING"
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import (  # type: ignore[import-not-found]
            StorageType,
        )
        from dlrover.trainer.torch.flash_checkpoint.ddp import (  # type: ignore[import-not-found]
            DdpCheckpointer,
        )

        self._type = StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(str(directory))

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, self.work.state(), storage_type=self._type)

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine._shm_handler.unlink()  # it would stay in /dev/shm
        engine.close()
        shutil.rmtree(Path("/tmp/ckpt_sock", self._name), ignore_errors=True)
