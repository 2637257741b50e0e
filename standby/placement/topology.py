"""Node → minipod, from ``scontrol show topology`` or a topology.conf. Pure.

A minipod is what lies under one switch of the level below the top of the network: within it
placement makes no measurable difference (Arnold, arXiv 2509.15940: at most 0.3 %), between
minipods it does. Leaf switches come from ``checkpoint.planning.topology.leaves``; what is
above them from ``Switches=``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from robust_slurm.checkpoint.planning.topology import MAX_NODES, at_most, leaves
from robust_slurm.slurm.values import ParseError, expand

_KEYS = ("SwitchName", "BlockName", "Nodes", "Switches", "Level")
_KEY = re.compile(r"(?<!\S)(" + "|".join(_KEYS) + r")\s*=\s*", re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"(\w+)=(\S*)", re.ASCII)
_SPELLING = {key.lower(): key for key in _KEYS}


def minipods(text: str, level: int | None = None) -> dict[str, str]:
    """Node → name of the switch above it at ``level``.

    Level 0 is the leaf switch. Without ``level``: the highest one that has more than one switch,
    so the spine of a network of leaf, spine and core, and the leaf where there is no spine. A
    branch of the tree that ends below ``level`` counts by its top. Blocks (topology/block) have
    one level, the base block. Empty where there is no topology or it cannot be read.
    ValueError for a negative level.
    """
    if level is not None and level < 0:
        raise ValueError(f"level {level}: 0 is the leaf switch")
    text = _as_scontrol(text)
    leaf = leaves(text)
    above = _parents(text)
    chains = {switch: _chain(switch, above) for switch in dict.fromkeys(leaf.values())}
    if level is None:
        level = _level(chains)
    return {node: _at(chains[switch], level) for node, switch in leaf.items()}


def _as_scontrol(text: str) -> str:
    """topology.conf written as scontrol writes it: no comments, one record a line, keys spelt."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    bare = "\n".join(line.partition("#")[0] for line in joined.splitlines())
    return _KEY.sub(lambda match: _SPELLING[match[1].lower()] + "=", bare)


def _parents(text: str) -> dict[str, str]:
    """Switch → switch above it; the first where several are named. Empty if it cannot be read."""
    above: dict[str, str] = {}
    for line in text.splitlines():
        words = dict(_WORD.findall(line))
        name, below = words.get("SwitchName"), words.get("Switches", "")
        if not name or not below:
            continue
        if len(above) + at_most(below) > MAX_NODES:
            return {}
        try:
            for child in expand(below):
                above.setdefault(child, name)
        except (ParseError, ValueError, IndexError):
            return {}
    return above


def _chain(switch: str, above: Mapping[str, str]) -> list[str]:
    """The switch and all above it, lowest first. A circle ends where it closes."""
    chain = [switch]
    while (upper := above.get(chain[-1])) is not None and upper not in chain:
        chain.append(upper)
    return chain


def _level(chains: Mapping[str, list[str]]) -> int:
    """The highest level that still tells nodes apart; 0 if none does."""
    highest = max(map(len, chains.values()), default=1) - 1
    for level in range(highest, 0, -1):
        if len({_at(chain, level) for chain in chains.values()}) > 1:
            return level
    return 0


def _at(chain: list[str], level: int) -> str:
    return chain[min(level, len(chain) - 1)]
