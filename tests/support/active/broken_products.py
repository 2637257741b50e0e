"""An active test in a process whose matrix products are sometimes wrong; see ``programs``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from places import PROGRAMS

PROGRAM = PROGRAMS / "wrong_products.py"


def run(test: str, seed: int, chance: float) -> dict[str, Any]:
    """Measure on the CPU; each product is wrong with that chance."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), test, str(seed), str(chance)],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # as workers: spinning takes the core
        capture_output=True,
        timeout=120,
        check=True,
    )
    (found,) = json.loads(done.stdout)
    return dict(found)
