"""Rank, arguments and one variable, as the program gets them: words.py [--variable NAME] WORD…"""

from __future__ import annotations

import os
import sys
import time

import here  # type: ignore[import-not-found]

here.started()
time.sleep(0.5)
words = sys.argv[1:]
if words[:1] == ["--variable"]:
    words = [words[1], os.environ.get(words[1], "not set")]
for number, word in enumerate(words):
    shown = word if len(word) < 100 else f"{len(word)} characters"
    if number < 20 or number == len(words) - 1:
        print(f"rank {here.RANK}: {number} {os.fsencode(shown)!r}")
