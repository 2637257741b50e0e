"""The table of health/pages/README.md that says which ERROR closes the gate, from the data.

``python -m lab.pages.check_table`` writes it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from health.check import EVERYWHERE, PLACES, Check

README = Path(__file__).resolve().parents[2] / "health" / "pages" / "README.md"
BEGIN = "<!-- generated: python -m lab.pages.check_table -->"
END = "<!-- end -->"


def table(checks: Iterable[Check]) -> str:
    """One row for each family: where it runs, how long it may take, and what its ERRORs do."""
    rows = [
        "| family | runs in | deadline | its ERRORs | close the gate |",
        "|---|---|---|---|---|",
    ]
    for check in checks:
        where = "everywhere" if check.where == EVERYWHERE else ", ".join(_places(check))
        named = [f"`{c.check}`" for c in check.conditions if c.status == "ERROR"]
        errors = ", ".join([f"`{check.name}-error`", *named])
        closes = "**yes**" if check.closes_on_error else "no"
        name = f"[{check.name}]({check.name}.md)"
        rows.append(f"| {name} | {where} | {check.deadline_s:g} s | {errors} | {closes} |")
    return "\n".join(rows)


def _places(check: Check) -> list[str]:
    return [where for where in PLACES if where in check.where]


def filled(text: str, checks: Iterable[Check]) -> str:
    """The page with the table between its marks. Raises ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} in it")
    return f"{before}{BEGIN}\n\n{table(checks)}\n\n{END}{after}"


def main() -> int:
    from health.checks import ALL

    README.write_text(filled(README.read_text(encoding="utf-8"), ALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
