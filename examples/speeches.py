"""A plan of data for ``train_lm.py --plan speeches:plan``: speeches of a play, packed into rows.

The training imports it, and so does the data process that robust-task keeps on every node: the
plan has a name, speeches:plan, because a function cannot be sent to another process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robust_slurm import data


def as_bytes(record: dict[str, Any]) -> dict[str, Any]:
    """Return a speech's bytes as tokens: here a training has its tokenizer."""
    import numpy

    text = f"{record['speaker']}:\n{record['text']}\n"
    return {"tokens": numpy.frombuffer(text.encode(), dtype=numpy.uint8)}


plan = data.Plan(
    sources={"play": data.jsonl(str(Path(__file__).parent / "data/speeches/*.jsonl"), as_bytes)},
    cost=lambda meta: meta.tokens**2,  # attention
    pack=65,  # --context, and one more: every token has a target
    batch=8,
)
