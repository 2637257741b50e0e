"""Node → minipod, from the output of ``scontrol show topology``. Pure.

A minipod is what lies under one switch of the level below the top of the network: within it
placement makes no measurable difference (Arnold, arXiv 2509.15940: at most 0.3 %), between
minipods it does. Leaf switches come from ``checkpoint.planning.topology.leaves``; what is
above them from ``Switches=``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from robust_slurm.checkpoint.planning.topology import MAX_NODES, leaves
from robust_slurm.slurm.values import ParseError, expand

_WORD = re.compile(r"(\w+)=(\S*)", re.ASCII)


def minipods(text: str) -> dict[str, str]:
    """Node → name of the switch above it, at the highest level that has more than one switch.

    That is the spine in a network of leaf, spine and core, and the leaf where there is no spine.
    A branch of the tree that ends below that level counts by its top. Blocks (topology/block)
    have one level, the base block. Empty where there is no topology or it cannot be read.
    """
    leaf = leaves(text)
    above = _parents(text)
    chains = {switch: _chain(switch, above) for switch in dict.fromkeys(leaf.values())}
    level = _level(chains)
    return {node: _at(chains[switch], level) for node, switch in leaf.items()}


def _parents(text: str) -> dict[str, str]:
    """Switch → switch above it; the first where several are named. Empty if it cannot be read."""
    above: dict[str, str] = {}
    for line in text.splitlines():
        words = dict(_WORD.findall(line))
        name, below = words.get("SwitchName"), words.get("Switches", "")
        if not name or not below:
            continue
        try:
            for child in expand(below):
                above.setdefault(child, name)
        except ParseError:
            return {}
        if len(above) > MAX_NODES:
            return {}
    return above


def _chain(switch: str, above: Mapping[str, str]) -> list[str]:
    """Return the switch and all above it, lowest first. A cycle ends where it closes."""
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
