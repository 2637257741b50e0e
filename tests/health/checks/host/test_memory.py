"""The memory family."""

from __future__ import annotations

from typing import Any

import pytest
from fake_host import MEMINFO, SLURM_CONF, SPOOL, healthy, ids
from fake_system import context
from hypothesis import given
from hypothesis import strategies as st

from health.checks.host import memory

run = memory.CHECK.run
JOB = {f"{SPOOL}/n1_55.4294967292": ""}
FAIL, WARN = "FAIL", "WARN"


def meminfo(**values: int) -> dict[str, str]:
    text = MEMINFO
    for key, value in values.items():
        lines = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
        text = "\n".join([*lines, f"{key}: {value} kB", ""])
    return {"/proc/meminfo": text}


@given(st.text(max_size=200))
def test_any_text_is_a_meminfo(text: str) -> None:
    assert all(value >= 0 for value in memory.parse_meminfo(text).values())


@pytest.mark.parametrize(
    ("total", "conf", "fleet", "found"),
    [
        (2_113_560_000, SLURM_CONF, {}, []),
        (2_010_000_000, SLURM_CONF, {}, []),  # within 2 % of 2,000,000 MiB
        (1_980_000_000, SLURM_CONF, {}, [(FAIL, "memory-missing", "")]),  # a DIMM of 128 GiB
        (1_980_000_000, SLURM_CONF.replace("RealMemory=2000000", ""), {}, []),
        (1_980_000_000, SLURM_CONF.replace("n[1-4]", "n[2-4]"), {}, []),
        (1_980_000_000, SLURM_CONF + "SlurmdParameters=config_overrides\n", {}, []),
        (1_980_000_000, SLURM_CONF, {"memory": 1_985_000_000}, []),  # the record wins
        (1_980_000_000, "", {"memory": 2_113_560_000}, [(FAIL, "memory-missing", "")]),
    ],
)
def test_size(total: int, conf: str, fleet: dict[str, Any], found: list[Any]) -> None:
    more = meminfo(MemTotal=total, MemAvailable=total - 10_000_000) | {
        "/etc/slurm/slurm.conf": conf
    }
    assert ids(run(healthy(more=more, fleet=fleet))) == found


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"MemAvailable": 1_200_000_000}, []),
        ({"MemAvailable": 900_000_000}, [(WARN, "memory-held", "")]),
        ({"MemAvailable": 300_000_000, "Shmem": 1_700_000_000}, [(FAIL, "memory-taken", "")]),
        ({"SwapFree": 2_000_000}, [(WARN, "swap-used", "")]),
        ({"SwapFree": 7_900_000}, []),  # a little swap is in use on any node
        ({"SwapFree": 2_000_000, "SwapCached": 6_000_000}, []),
        ({"HugePages_Total": 8192, "HugePages_Free": 0}, [(WARN, "hugepages-held", "")]),
        ({"HugePages_Total": 8192, "HugePages_Free": 8192}, []),
    ],
)
@pytest.mark.parametrize("where", ["prolog", "sweep"])
def test_an_idle_node(where: str, values: dict[str, int], found: list[Any]) -> None:
    more = meminfo(**values)
    assert ids(run(healthy(more=more, context=context(where)))) == found
    # A job may use all of it.
    assert run(healthy(more=more | JOB, context=context(where))) == []


def test_the_job_of_the_prolog_itself_is_no_other_job() -> None:
    more = meminfo(MemAvailable=300_000_000) | {f"{SPOOL}/n1_7.4294967292": ""}
    assert ids(run(healthy(more=more))) == [(FAIL, "memory-taken", "")]


def test_without_sight_of_the_jobs_nothing_is_said_of_use() -> None:
    more = meminfo(MemAvailable=300_000_000)
    broken = {SPOOL: PermissionError(13, "denied")}
    assert run(healthy(more=more, fail=broken)) == []


def test_the_cache_of_zfs_gives_way() -> None:
    arc = "13 1 0x01 147 39984 1 1\nname type data\nhits 4 9\nsize    4    1500000000000\n"
    more = meminfo(MemAvailable=300_000_000) | {"/proc/spl/kstat/zfs/arcstats": arc}
    assert run(healthy(more=more)) == []


@pytest.mark.parametrize(
    ("counts", "uptime", "found"),
    [
        ({"ue_count": "1\n"}, 1000.0, [(FAIL, "memory-uncorrected", "mc0")]),
        ({"ce_count": "900\n"}, 1000.0, []),
        ({"ce_count": "5000\n"}, 864_000.0, []),  # 500 a day
        (
            {"ce_count": "5000\n", "seconds_since_reset": "3600\n"},
            1000.0,
            [(WARN, "memory-corrected", "mc0")],
        ),
        ({"ce_count": "50000\n"}, 1000.0, [(WARN, "memory-corrected", "mc0")]),
        ({"ue_count": "", "ce_count": "nonsense"}, 1000.0, []),
    ],
)
def test_edac(counts: dict[str, str], uptime: float, found: list[Any]) -> None:
    base = "/sys/devices/system/edac/mc/mc0"
    more = {f"{base}/{name}": value for name, value in counts.items()}
    assert ids(run(healthy(more=more, uptime=uptime))) == found


def test_the_dimm_is_named() -> None:
    base = "/sys/devices/system/edac/mc/mc0"
    more = {
        f"{base}/ue_count": "2",
        f"{base}/dimm0/dimm_ue_count": "0",
        f"{base}/dimm3/dimm_ue_count": "2",
        f"{base}/dimm3/dimm_label": "CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
    }
    [finding] = run(healthy(more=more))
    assert "DIMM CPU_SrcID#0_MC#0_Chan#1_DIMM#0" in finding.evidence
    assert finding.action == "reboot"
