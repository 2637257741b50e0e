"""The catalogue of signatures: read from TOML, checked when it is loaded."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from srun_wrapper.signatures.literals import needed

OWN = Path(__file__).with_name("catalogue.toml")

LAYERS = (
    "user_code", "config", "data", "gpu_hardware", "driver", "nvlink", "ib", "tcp",
    "host_hardware", "host_oom", "gpu_oom", "storage", "container", "scheduler", "preemption",
    "sdc_nan", "unknown",
)  # fmt: skip
CHOICES = {
    "role": ("root", "cascade"),
    "layer": LAYERS,
    "blame": ("node", "user", "transient", "external", "unknown"),
    "evict": ("yes", "after_test", "no"),
}
TEXTS = ("id", "pattern", "cause", "advice")
FIELDS = {*TEXTS, *CHOICES, "weight"}
LONGEST = 2000  # characters of a line that are looked at: a pattern's time is bounded


class CatalogueError(Exception):
    """A file of signatures that cannot be used; the text names the file and the signature."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A form of line and its meaning. ``weight`` 0 to 100: how much it says about the cause."""

    id: str
    pattern: re.Pattern[str]
    cause: str
    role: str
    layer: str
    blame: str
    evict: str
    weight: int
    advice: str
    words: tuple[str, ...] | None = None  # a line without any of them does not match


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """Signatures in the order in which they are tried; compared by identity, so hashed fast."""

    signatures: tuple[Signature, ...]

    def match(self, text: str) -> tuple[Signature, str] | None:
        """Return the first signature that matches, and the node that its line names ("": none)."""
        text = text[:LONGEST]
        lower = text.lower()
        for signature in self.signatures:
            if signature.words is not None and not any(w in lower for w in signature.words):
                continue
            if found := signature.pattern.search(text):
                named = (v for k, v in found.groupdict().items() if k.startswith("node") and v)
                return signature, next(named, "")
        return None


def load(site: Path | None = None) -> Catalogue:
    """Return our signatures, after the site's own if there are any. Raises CatalogueError."""
    own = _own()
    return own if site is None else Catalogue(read(site) + own.signatures)


@cache
def _own() -> Catalogue:
    return Catalogue(read(OWN))


def read(path: Path) -> tuple[Signature, ...]:
    """Return the signatures of one file, in its order. Raises CatalogueError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogueError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path}: not TOML: {error}") from None
    if unknown := set(data) - {"group", "signature"}:
        raise CatalogueError(f"{path}: unknown table {min(unknown)!r}; use [[signature]]")
    groups = _tables(path, "group", data.get("group", []))
    groups.append({"signatures": data.get("signature", [])})
    found: list[Signature] = []
    for group in groups:
        shared = {k: v for k, v in group.items() if k not in ("name", "signatures")}
        for each in _tables(path, "signatures", group.get("signatures", [])):
            found.append(_signature(path, {**shared, **each}))
    names = [each.id for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CatalogueError(f"{path}: the id {twice[0]!r} is used twice")
    return tuple(found)


def _tables(path: Path, name: str, value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise CatalogueError(f"{path}: {name} must be an array of tables")
    return list(value)


def _signature(path: Path, table: Mapping[str, Any]) -> Signature:
    where = f"{path}: signature {table.get('id', '(without id)')!r}"
    values = {"role": "root", "evict": "no", "weight": 80, "advice": "", **table}
    for name in TEXTS:
        if not isinstance(values.get(name), str) or not (values[name] or name == "advice"):
            raise CatalogueError(f"{where}: {name} must be a text")
    if unknown := set(values) - FIELDS:
        raise CatalogueError(f"{where}: unknown field {min(unknown)!r}")
    for name, choices in CHOICES.items():
        if values.get(name) not in choices:
            raise CatalogueError(f"{where}: {name} must be one of {', '.join(choices)}")
    weight = values["weight"]
    if type(weight) is not int or not 0 <= weight <= 100:
        raise CatalogueError(f"{where}: weight must be a whole number from 0 to 100")
    if values["evict"] == "yes" and values["blame"] != "node":
        raise CatalogueError(f"{where}: evict = yes needs blame = node")
    try:
        pattern = re.compile(values["pattern"], re.IGNORECASE)
    except re.error as error:
        raise CatalogueError(f"{where}: pattern: {error}") from None
    if pattern.search(""):
        raise CatalogueError(f"{where}: pattern matches every line")
    return Signature(**{**values, "pattern": pattern, "words": needed(pattern.pattern)})
