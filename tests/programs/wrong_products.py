"""Run one active test with matrix products that are sometimes wrong; print what it measured.

``wrong_products.py TEST SEED CHANCE MODEL...``: each product of aten::mm and aten::addmm on the CPU
has, with that chance, one bit of one element changed. The lowest level that a test can reach.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["MKL_CBWR"] = "AUTO"
os.environ["MKL_DYNAMIC"] = "FALSE"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from health.active.worker import bitwise, device, gemm

test, seed, chance = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chosen = random.Random(seed)


def wrong(out: Any) -> Any:
    if chosen.random() < chance:
        bits = out.view({2: torch.int16, 4: torch.int32}[out.element_size()])
        bits[-1, -1] ^= 1 << 8 * out.element_size() - 10  # of the exponent
    return out


library = torch.library.Library("aten", "IMPL")
if chance:
    library.impl("mm", lambda a, b: wrong(torch.bmm(a[None], b[None])[0]), "CPU")
    library.impl("addmm", lambda c, a, b, **_: wrong(c + torch.bmm(a[None], b[None])[0]), "CPU")
device.use_all_cores()
if test == "gemm":
    found = gemm.run(device.devices(), 1.0, seed)
else:
    found = bitwise.run(device.devices(), sys.argv[4:] or bitwise.MODELS, 4, 0.0, seed)
print(json.dumps([one.as_dict() for one in found]))
