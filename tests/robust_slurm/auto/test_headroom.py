"""The memory that is left, from recorded /proc and /sys/fs/cgroup trees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from robust_slurm.auto.headroom import headroom

MIB = 1 << 20
FREE = {"meminfo": "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n"}  # 8 GiB
V2 = {"self/cgroup": "0::/slurm/job_1/step_0\n"}
V1 = {"self/cgroup": "11:cpu,cpuacct:/\n4:memory:/slurm/job_1\n"}
STAT = "anon 5\ninactive_file 1048576\nactive_file 2097152\nslab 7\n"
STAT_V1 = "active_file 9\ntotal_inactive_file 1048576\ntotal_active_file 2097152\n"


@pytest.mark.parametrize(
    ("proc", "groups", "mib"),
    [
        (FREE, {}, 8192),
        (FREE | V2, {}, 8192),
        (FREE | V2, {"slurm/job_1/memory.max": "max", "slurm/job_1/memory.current": "1"}, 8192),
        (
            FREE | V2,
            {
                "slurm/job_1/step_0/memory.max": "max",
                "slurm/job_1/memory.max": str(100 * MIB),
                "slurm/job_1/memory.current": str(90 * MIB),
                "slurm/job_1/memory.stat": STAT,
            },
            13,
        ),
        (
            FREE | V2,
            {"slurm/memory.max": str(5 * MIB), "slurm/memory.current": str(6 * MIB)},
            0,
        ),
        (
            FREE | V1,
            {
                "memory/slurm/job_1/memory.limit_in_bytes": str(100 * MIB),
                "memory/slurm/job_1/memory.usage_in_bytes": str(90 * MIB),
                "memory/slurm/job_1/memory.stat": STAT_V1,
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5",
            },
            13,
        ),
    ],
)
def test_headroom(
    tmp_path: Path, proc: Mapping[str, str], groups: Mapping[str, str], mib: int
) -> None:
    for root, files in (("proc", proc), ("cgroup", groups)):
        for name, text in files.items():
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    found = headroom(str(tmp_path / "proc"), str(tmp_path / "cgroup"))
    assert found // MIB == mib
