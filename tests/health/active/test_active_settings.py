"""The table [active] of robust.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from health import settings
from health.active.judging.profiles import with_site
from health.checks import ALL
from health.settings_file import END


def load(tmp_path: Path, text: str) -> settings.Settings:
    for above in (tmp_path, *tmp_path.parents):
        if "pytest" in above.name:  # writable by its owner alone, as root's file must be
            above.chmod(0o755)
    path = tmp_path / "robust.toml"
    path.write_text(f"{text}\n{END}\n")
    path.chmod(0o644)
    return settings.load(str(path), "n1", ALL)


def test_nothing_is_run_unless_the_site_names_an_interpreter() -> None:
    active = settings.defaults(ALL).active
    assert (active["python"], active["undrain"], active["floors"]) == ("", "never", {})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('python = "python3"', "not an absolute path"),
        ('accused = "standard"', "use one of never, quick"),
        ('undrain = "long"', "use one of never, quick"),  # slurmd gives the sweep 60 s
        ('burn_in = "never"', "use one of quick, standard, long"),
        ("deadline = 0", "must be above 0"),
        ("floors = 3", "not a table"),
        ('floors = { "NVIDIA H200" = 3 }', "NVIDIA H200: not a table of numbers"),
        ('floors = { "NVIDIA H200" = { bf16_tflops = "x" } }', "bf16_tflops: not a number"),
        ('floors = { "NVIDIA H200" = { bf16_tflops = -1 } }', "must not be below 0"),
        ('floors = { "NVIDIA H200" = { bf16_tflops = true } }', "bf16_tflops: not a number"),
        ('floors = { "NVIDIA H200" = { bf16_tflops = nan } }', "bf16_tflops: not a usable number"),
        ("pythn = 1", "did you mean python?"),
    ],
)
def test_what_cannot_be_used_keeps_its_default(tmp_path: Path, line: str, problem: str) -> None:
    found = load(tmp_path, f"[active]\n{line}\n")
    (said,) = found.problems
    assert problem in said
    assert found.active == settings.defaults(ALL).active


def test_floors_reach_the_judgement(tmp_path: Path) -> None:
    text = '[active.floors."NVIDIA H200"]\nbf16_tflops = 600\nmemory_gbps = 0\n'
    found = load(tmp_path, text + '[nodes.n1.active.floors."my GPU"]\nfp32_tflops = 5.5\n')
    assert found.problems == ()
    floors: dict[str, Any] = found.active["floors"]
    assert floors == {"my GPU": {"fp32_tflops": 5.5}}, "of this node alone; later wins"
    chosen = with_site(load(tmp_path, text).active["floors"])
    limit = chosen("NVIDIA H200", "bf16_tflops")
    assert limit is not None and limit.limit == 600
    assert chosen("NVIDIA H200", "memory_gbps") is None
