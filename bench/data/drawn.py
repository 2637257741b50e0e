"""A random plan: its corpora, rules, ranks and restarts, all of a seed.

Token ``i`` of document ``n`` is ``n * SPAN + i``, so that any row shows which documents it has.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robust_slurm import data

SPAN = 1 << 10
LONGEST = 900
PER_SOURCE = 10_000  # numbers of documents
PACKS = (16, 33, 64, 100, 128)
RANKS = (1, 1, 2, 2, 3, 4, 5, 7, 8, 12, 13, 16, 24, 31, 37, 48, 50, 63, 64)
FORMS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "tar", "tar.zst", "list", "stream")
DECODES = ("none", "list", "array", "buffer", "tensor", "tensor buffer", "some", "bad")
LENGTHS = ("whole rows", "row or less", "small", "lognormal", "long")

Document = tuple[int, int]
"""A document's number and its tokens."""


@dataclass
class DrawnPlan:
    """Arguments of a plan, and what becomes of the training."""

    seed: int
    pack: int | None
    long: str
    fill: float
    batch: int
    epochs: int | None
    mix: str
    costs: str
    ranks: list[int]
    """Data-parallel ranks at first, and after each restart."""
    inner: int
    """Ranks that have the same rows."""
    steps: list[int]
    """Steps until each restart."""
    ahead: int
    threads: int
    """Threads that ask the one loader for batches."""
    prefetched: int = 0
    """Batches that a rank has taken and not used when it saves."""
    corpora: dict[str, dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, list[Document]] = field(default_factory=dict)
    """Documents of each source that decode does not leave out."""

    def weights(self) -> Any:
        """Return the mixture."""
        names = sorted(self.corpora)
        chance = random.Random(self.seed)
        some = {name: chance.uniform(0.2, 3.0) for name in names}
        last = {name: float(name == names[-1]) for name in names}
        first = {name: float(name == names[0]) for name in names}
        by_name: dict[str, Any] = {
            "alike": None,
            "constant": some,
            "by step": lambda step: {
                n: some[n] * (1 + (step + at) % 3) for at, n in enumerate(names)
            },
            "curriculum": lambda step: first if step < 7 else last,
            "in turn": lambda step: {names[step % len(names)]: 1.0},
        }
        return by_name[self.mix]

    def plan(self, sources: Mapping[str, Any], ranks: int, epochs: int | None) -> data.Plan:
        """Return it, for so many data-parallel ranks."""
        mesh = {"dp": ranks, "tp": self.inner} if self.inner > 1 else None
        costs: dict[str, Any] = {
            "tokens": None,
            "squared": lambda meta: meta.tokens**2,
            "none": lambda _meta: 0,
        }
        return data.Plan(
            sources,
            mix=self.weights(),
            cost=costs[self.costs],
            pack=self.pack,
            long=self.long,
            batch=self.batch,
            mesh=mesh,
            seed=self.seed,
            epochs=epochs,
            fill=self.fill,
            pad={"tokens": -1},
        )


def draw(seed: int) -> DrawnPlan:
    """Return the plan of a seed."""
    chance = random.Random(seed)
    pack = chance.choice([None, *PACKS])
    made = DrawnPlan(
        seed,
        pack,
        chance.choice(["split", "truncate"]) if pack else "split",
        chance.choice([0.98, 0.98, 1.0, 0.9, chance.uniform(0.5, 1.0)]),
        chance.choice([1, 1, 2, 3, 5]),
        chance.choice([None, 1, 1, 2]),
        chance.choice(["alike", "constant", "by step", "curriculum", "in turn"]),
        chance.choice(["tokens", "squared", "none"]),
        [chance.choice(RANKS)],
        chance.choice([1, 1, 1, 2, 3]),
        [chance.randint(0, 6) for _ in range(chance.randint(0, 4))],
        chance.randint(1, 4),
        chance.choice([1, 1, 3]),
        chance.choice([0, 0, 1, 2]),
    )
    chunked = chance.random() < 0.2  # a corpus that was cut to rows before
    if chunked:
        made.batch = 1
    for _ in made.steps:
        made.ranks.append(chance.choice([made.ranks[-1], chance.choice(RANKS)]))
    wanted = max(made.ranks) * made.batch * chance.uniform(0.5, 9.0)
    sources = chance.randint(1, 3)
    for source in range(sources):
        name = "abc"[source]
        law = "whole rows" if chunked else chance.choice(LENGTHS)
        each = pack or 30
        count = (
            int(wanted / sources)
            if pack is None
            else int(wanted * pack / sources / _mean(law, each))
        )
        count = max(1, min(1500, count))
        parts = chance.randint(1, min(5, count))
        made.corpora[name] = {
            "form": chance.choice(FORMS),
            "decode": chance.choice(DECODES),
            "parts": [[] for _ in range(parts)],
            "lanes": chance.randint(1, 5),
            "window": chance.choice([1, 3, 16, 256]),
            "parallel": chance.random() < 0.3,
            "twice": chance.random() < 0.2,
        }
        corpus = made.corpora[name]
        made.documents[name] = []
        for at in range(count):
            number = source * PER_SOURCE + at
            document = (number, _length(chance, law, each))
            corpus["parts"][chance.randrange(parts) if at >= parts else at].append(document)
            if not left_out(corpus["decode"], number):
                made.documents[name].append(document)
    return made


def _mean(law: str, pack: int) -> float:
    return {"row or less": 0.6, "small": 0.15, "long": 3.0}.get(law, 1.0) * pack


def _length(chance: random.Random, law: str, pack: int) -> int:
    longest = {"whole rows": pack, "row or less": pack, "small": max(1, pack // 4)}
    length = {
        "whole rows": lambda: pack,
        "row or less": lambda: chance.randint(1, pack),
        "small": lambda: chance.randint(1, max(1, pack // 4)),
        "lognormal": lambda: round(chance.lognormvariate(0.0, 1.0) * pack / 2),
        "long": lambda: chance.randint(1, 6) * pack - chance.choice([0, 0, pack // 3]),
    }[law]()
    return max(1, min(longest.get(law, LONGEST), length))


def left_out(decode: str, number: int) -> bool:
    """True for a document that decode leaves out, or that is bad."""
    return number % 5 == 3 and decode in ("some", "bad")


def tokens_of(document: Document) -> list[int]:
    """Return all its tokens."""
    number, length = document
    return list(range(number * SPAN, number * SPAN + length))


def decode_of(kind: str, form: str) -> Callable[[Any], Any] | None:
    """Return a decode of this kind, for records as the form has them."""
    import numpy
    import torch

    buffer = numpy.zeros(SPAN, numpy.int64)
    shared = torch.zeros(SPAN, dtype=torch.int64)

    def decode(record: Any) -> Any:
        if form.startswith("tar"):
            record = json.loads(record["json"])
        tokens = record["tokens"]
        number = int(tokens[0]) // SPAN
        if left_out(kind, number):
            if kind == "bad":
                raise ValueError(f"document {number} is bad")
            return None
        if kind == "array":
            return {"tokens": numpy.array(tokens, numpy.int32)}
        if kind == "buffer":
            buffer[: len(tokens)] = tokens
            return {"tokens": buffer[: len(tokens)]} if len(tokens) < 60 else _whole(buffer, tokens)
        if kind == "tensor":
            return {"tokens": torch.tensor(tokens, dtype=torch.int64)}
        if kind == "tensor buffer":
            shared[: len(tokens)] = torch.tensor(tokens)
            return {"tokens": shared[: len(tokens)]}
        return {"tokens": list(tokens)}

    return None if kind == "none" else decode


_arrays: dict[int, Any] = {}


def _whole(buffer: Any, tokens: Any) -> dict[str, Any]:
    """Return an array that owns its memory, the same for all documents of this length."""
    own = _arrays.setdefault(len(tokens), buffer[: len(tokens)].copy())
    own[:] = tokens
    return {"tokens": own}


def sources_of(drawn: DrawnPlan, folder: Path) -> dict[str, Any]:
    """Return the sources, of files that ``write`` has written."""
    return {name: _source(corpus, folder / name) for name, corpus in drawn.corpora.items()}


def _source(corpus: dict[str, Any], folder: Path) -> Any:
    form, kind = corpus["form"], corpus["decode"]
    options: dict[str, Any] = {"lanes": corpus["lanes"], "window": corpus["window"]}
    if kind == "bad":
        options |= {"bad": "skip", "most_bad": 1.0}
    decode = decode_of(kind, form)
    options["parallel"] = corpus["parallel"] and "buffer" not in kind
    if form in ("list", "stream"):
        return data.records(_rows(corpus, form), decode, **options)
    make: Any = {"parquet": data.parquet, "arrow": data.arrow}.get(
        form, data.tar if form.startswith("tar") else data.jsonl
    )
    patterns = [f"{folder}/*.{form}"]
    if corpus["twice"]:
        patterns += [f"{folder}/x/../*.{form}", f"{folder}-link/*.{form}"]
    return make(patterns, decode, **options)


def _rows(corpus: dict[str, Any], form: str) -> Any:
    """Return what is read without files. Hugging Face takes a second to make it: it is kept."""
    if "rows" not in corpus:
        corpus["rows"] = _made_rows(corpus, form)
    return corpus["rows"]


def _made_rows(corpus: Mapping[str, Any], form: str) -> Any:
    parts = [[{"tokens": tokens_of(document)} for document in part] for part in corpus["parts"]]
    if form == "list":
        return [row for part in parts for row in part]
    try:
        import datasets
    except ImportError:
        return [row for part in parts for row in part]
    return datasets.IterableDataset.from_generator(_given, gen_kwargs={"parts": parts})


def _given(parts: list[list[Any]]) -> Iterator[Any]:
    for part in parts:
        yield from part


def write(drawn: DrawnPlan, folder: Path) -> None:
    """Write the files of all sources."""
    for name, corpus in drawn.corpora.items():
        if corpus["form"] in ("list", "stream"):
            continue
        (folder / name / "x").mkdir(parents=True)
        (folder / f"{name}-link").symlink_to(folder / name)
        for at, part in enumerate(corpus["parts"]):
            rows = [{"tokens": tokens_of(document)} for document in part]
            file = folder / name / f"{at}.{corpus['form']}"
            file.write_bytes(_content(corpus["form"], rows))


def _content(form: str, rows: list[dict[str, Any]]) -> bytes:
    import zstandard

    if form == "parquet" or form == "arrow":
        return _columns(form, rows)
    made = _tar(rows) if form.startswith("tar") else _lines(rows)
    if form.endswith(".gz"):
        return gzip.compress(made)
    return zstandard.compress(made) if form.endswith(".zst") else made


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _columns(form: str, rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table, file = pyarrow.Table.from_pylist(rows), io.BytesIO()
    if form == "parquet":
        parquet.write_table(table, file, row_group_size=max(1, len(rows) // 2))
        return file.getvalue()
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return file.getvalue()


def _tar(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for at, row in enumerate(rows):
            content = json.dumps(row).encode()
            member = tarfile.TarInfo(f"{at:06}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()
