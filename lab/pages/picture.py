"""docs/demo.svg: a picture of what `make demo` printed, shortened, as a terminal shows it.

`python -m lab.pages.picture` runs the demo (root); with the name of a file it reads the demo's output
from there. Lines are left out, none is changed. Exit codes: 0 written; else the demo's own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lab.host import REPOSITORY

PICTURE = REPOSITORY / "docs" / "demo.svg"
WIDTH = 104
# The lines that tell the story, in the demo's own words.
_KEPT = re.compile(
    r"a node dies under|a real Slurm|is job \d|step +1  loss|step 240  loss|COMPLETED| fault  "
    r"|resumed after|training again|recovered from|DOWN only|curves are equal|CURVES DIFFER|[█▁]{9}"
    r"|\^ \w+ dies|taken down"
)
_MARGIN = 17  # columns of the time and of who speaks
_LEFT_OUT = "            ⋮"
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.pages.picture", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="output of the demo, with its colours")
    args = parser.parse_args(argv)
    if args.file is not None:
        printed = args.file.read_text(encoding="utf-8")
    else:
        env = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "100", "TERM": "xterm-256color"}
        demo = [sys.executable, "-m", "lab.demo"]
        done = subprocess.run(demo, env=env, stdout=subprocess.PIPE, text=True, timeout=1800)
        print(done.stdout)
        if done.returncode:
            return done.returncode
        printed = done.stdout
    PICTURE.write_text(drawn(printed), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(REPOSITORY)}")
    return 0


def drawn(printed: str) -> str:
    """Return the picture of the demo's output as SVG without a font from elsewhere."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for line in shortened(printed.splitlines()):
        text = Text.from_ansi(line)
        if not re.match(r" *\d+\.\d s ", text.plain):
            console.print(text)
            continue
        first, *more = text[_MARGIN:].wrap(console, WIDTH - _MARGIN)
        console.print(text[:_MARGIN] + first)
        for each in more:
            console.print(Text(" " * _MARGIN) + each)
    svg = console.export_svg(title="make demo", unique_id="demo")
    return _FONT_FACE.sub("", svg).replace("Fira Code", "DejaVu Sans Mono")


def shortened(lines: Sequence[str]) -> list[str]:
    """Return the lines of the story, the step before the fault among them, and marks of gaps."""
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    kept = {at for at, line in enumerate(plain) if _KEPT.search(line)}
    kept |= {at - 1 for at, line in enumerate(plain) if " fault  " in line}
    found: list[str] = []
    before = -1
    for at in sorted(kept):
        if before >= 0 and at > before + 1:
            found.append(_LEFT_OUT)
        found.append(lines[at])
        before = at
    return found


if __name__ == "__main__":
    raise SystemExit(main())
