"""`python -m lab.pages` writes all generated pages anew; `--check` only names those that are stale.

Exit codes: 0 all are up to date (or were written), 1 some are stale, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.host import REPOSITORY
from lab.pages import commands, completion, man, messages, settings
from lab.pages.parsers import NAMES


def pages() -> dict[Path, str]:
    """Return the text of every generated file by its path in the repository."""
    made = {
        Path("docs/settings.md"): settings.page(),
        Path("docs/commands.md"): commands.page(),
        Path("docs/messages.md"): messages.page(),
    }
    for name in NAMES:
        made[Path(f"docs/man/{name}.1")] = man.page(name)
        made[Path(f"docs/completion/{name}")] = completion.script(name)
    return made


def stale() -> list[Path]:
    """Return the generated files that differ from what the code makes now."""
    return [path for path, text in pages().items() if _read(REPOSITORY / path) != text]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.pages", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if one is stale"
    )
    found = stale()
    if parser.parse_args(argv).check:
        for path in found:
            print(f"{path} is stale: run python -m lab.pages")
        return 1 if found else 0
    made = pages()
    for path in found:
        (REPOSITORY / path).parent.mkdir(parents=True, exist_ok=True)
        (REPOSITORY / path).write_text(made[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
