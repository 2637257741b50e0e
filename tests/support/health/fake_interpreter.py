"""An interpreter of active tests that prints the answer it is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fake_python import fake_python
from gate_site import GateSite

from health.gate.active_answer import applying

ALL = sorted(applying(gpus=False))
WRONG = {
    "status": "FAIL", "class": "node", "check": "active-gemm-wrong", "device": "gpu3",
    "evidence": "2 of 9 products differ", "action": "service",
}  # fmt: skip


class FakeInterpreter:
    """Says what it was called with, prints an answer, and ends with its code."""

    def __init__(self, site: GateSite, undrain: str = "never", more: str = "") -> None:
        self.script, self.log = site.path / "python", site.path / "asked"
        self.path = fake_python(site.path / "environment", self.script)
        self.passes()
        site.settings(f"[active]\npython = '{self.path}'\nundrain = '{undrain}'\n{more}")

    def says(
        self, code: int, *rows: Any, before: str = "", ran: Sequence[str] = ALL, left: str = ""
    ) -> None:
        answer = json.dumps(
            {
                "findings": {"n1": rows},
                "cleared": [] if rows else ["n1"],
                "measured": [{"test": name} for name in ran],
                "left_out": [left] if left else [],
            }
        )
        text = f"#!/bin/sh\necho \"$@\" >> {self.log}\n{before}\necho '{answer}'\nexit {code}\n"
        fresh = self.script.with_suffix(".new")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(self.script)

    def passes(self) -> None:
        self.says(0)

    def fails(self) -> None:
        self.says(1, WRONG)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []
