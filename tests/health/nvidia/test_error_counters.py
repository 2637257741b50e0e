"""GPUs' error counters, as robust-task reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.hardware import Hardware, nvml_state, pci

from health.nvidia.error_counters import counters
from lab import fake_nvml
from lab.errors import LabError
from robust_slurm import commands


def test_the_names_of_a_gpus_counters() -> None:
    device = {
        "index": 3,
        "pci": "0000:3b:00.0",
        "ecc": {"enabled": True, "volatile_uncorrected": 2, "aggregate_corrected": 9},
        "pcie": {"replays": 4},
        "nvlinks": [{"link": 5, "active": True, "errors": {"replay": 1}}, {"link": 6}],
    }
    assert counters(device) == {
        "GPU 0000:3b:00.0 uncorrected ECC errors": 2,
        "GPU 0000:3b:00.0 PCIe replays": 4,
        "GPU 0000:3b:00.0 NVLink 5 replay errors": 1,
    }
    assert counters({"index": 3}) == {}


def test_the_program_asks_all_gpus(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    try:
        library = fake_nvml.build(tmp_path)
    except LabError as error:
        pytest.skip(str(error))
    hardware = Hardware("n1", 2, nvml={"gpu1.nvlink3.replay": "40"})
    library.with_name("nvml.state").write_text(nvml_state(hardware))
    done = subprocess.run(
        [sys.executable, *commands.own_words("health.nvidia.error_counters")],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    found = json.loads(done.stdout)
    assert {name for name, count in found.items() if count} == {
        f"GPU {pci(1)} NVLink 3 replay errors"
    }
    assert f"GPU {pci(0)} corrected ECC errors" in found
