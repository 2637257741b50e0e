"""A synthetic corpus by seed, and a tokenizer for it that costs real CPU time.

Read by all sides, Ray's in an interpreter of its own: imports nothing of this repository, and
numpy and pyarrow only where they are needed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 50_000
MARK = (
    1_000_000  # the first token of document n is MARK + n: whoever counts these sees what is lost
)
LONGEST = 12_000  # tokens
SIGMA = 1.0  # of the lengths' logarithm
MEDIANS = (150, 300, 450, 600)  # tokens of a document, by source
ROUNDS = 2  # of a hash for each token
PARQUET, JSONL = "parquet", "jsonl"
Tokenizer = Callable[[dict[str, Any]], dict[str, Any]]
_WORD = re.compile(r"\S+")


class Corpus(NamedTuple):
    """``sources`` folders ``s00``, …; of two neighbours one is JSONL and one Parquet."""

    root: Path
    sources: int
    files: int  # of each source
    documents: int  # of each file

    def names(self) -> list[str]:
        """Return the sources' names."""
        return [f"s{number:02}" for number in range(self.sources)]

    def pattern(self, source: str) -> str:
        """Return the glob of a source's files."""
        return str(self.root / source / f"*.{kind(source)}")

    def paths(self, source: str) -> list[Path]:
        """Return a source's files, sorted."""
        return sorted((self.root / source).iterdir())

    def weights(self) -> dict[str, float]:
        """Return the mixture: of each pair of neighbours the first three times as often."""
        return {name: (3.0, 1.0)[number % 2] for number, name in enumerate(self.names())}


def kind(source: str) -> str:
    """Return the format of a source."""
    return (JSONL, PARQUET)[int(source[1:]) % 2]


def lengths(chance: random.Random, source: int, number: int) -> list[int]:
    """Lengths of documents in tokens: lognormal, with a median that depends on the source."""
    median = MEDIANS[source % len(MEDIANS)]
    return [
        max(4, min(LONGEST, round(median * chance.lognormvariate(0.0, SIGMA))))
        for _ in range(number)
    ]


def make(corpus: Corpus, seed: int = 0) -> int:
    """Write all files. Returns the number of tokens."""
    chance = random.Random(seed)
    words = [
        "".join(chance.choices("etaoinshrdlucmfwypvbgk", k=chance.randint(2, 9)))
        for _ in range(5000)
    ]
    total = document = 0
    for number, source in enumerate(corpus.names()):
        (corpus.root / source).mkdir(parents=True)
        for part in range(corpus.files):
            records = []
            for length in lengths(chance, number, corpus.documents):
                text = " ".join(chance.choices(words, k=length - 1))
                records.append({"id": document, "text": text})
                document += 1
                total += length
            _write(corpus.root / source / f"part-{part:03}.{kind(source)}", records)
    return total


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == f".{JSONL}":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), path, compression="zstd")


def tokenise(record: dict[str, Any]) -> dict[str, Any]:
    """Return a document's tokens: normalised text, split into words, a number for each.

    About a quarter of a microsecond for a token, all of it with Python's lock held.
    """
    import numpy

    text = unicodedata.normalize("NFKC", record["text"])
    numbers = [zlib.crc32(word.encode()) % VOCABULARY for word in _WORD.findall(text)]
    return {"tokens": numpy.array([MARK + int(record["id"]), *numbers], dtype=numpy.int32)}


def tokenise_outside(record: dict[str, Any]) -> dict[str, Any]:
    """Return as many tokens, by a function that computes outside Python's lock for most of its
    time, as tokenizers in Rust do: about a microsecond for a token, which is their pace."""
    import numpy

    text = record["text"].encode()
    letters = numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.int32)
    starts = numpy.flatnonzero(letters == ord(" ")) + 1
    numbers = numpy.add.reduceat(letters, numpy.concatenate(([0], starts)))
    hashlib.pbkdf2_hmac("sha256", text, b"", max(1, len(numbers) * ROUNDS))
    first = numpy.array([MARK + int(record["id"])], dtype=numpy.int32)
    return {"tokens": numpy.concatenate((first, numbers)).astype(numpy.int32)}
