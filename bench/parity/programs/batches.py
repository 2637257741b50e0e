"""A training whose DataLoader has worker processes; one batch takes long to come."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import here  # type: ignore[import-not-found]
import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[int]):
    """Samples, of which one comes late."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> int:
        time.sleep(float(sys.argv[1]) if index == 40 else 0.05)
        return index


if __name__ == "__main__":
    here.started()
    torch.set_num_threads(1)
    total = 0
    for batch in DataLoader(Slow(), batch_size=2, num_workers=2):
        total += int(batch.sum())
    Path(f"total.{here.RANK}").write_text(str(total))
