"""Find the leaf switch of each node in the text of ``scontrol show topology``. Pure."""

from __future__ import annotations

import re

from robust_slurm.slurm.values import ParseError, expand

MAX_NODES = 1_000_000
"""A text that names more nodes is rejected."""

_WORD = re.compile(r"(\w+)=(\S*)", re.ASCII)


def leaves(text: str) -> dict[str, str]:
    """Node → name of its leaf switch (tree plugin) or base block (block plugin).

    Empty where the cluster has no topology, and for text that cannot be read: a wrong switch
    would promise more than no switch. A node on two leaf switches counts for the first of them.
    Formats: Slurm's ``_print_topo_record`` of topology/tree (``SwitchName=s0 Level=0 LinkSpeed=1
    Nodes=n[1-4]``; higher levels repeat the nodes below them) and of topology/block
    (``BlockName=b0 BlockIndex=0 Nodes=n[1-4] BlockSize=4``; ``AggregatedBlock=`` for larger ones).
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = dict(_WORD.findall(line))
        name = words.get("SwitchName") or words.get("BlockName")
        if not name or words.get("Level", "0") != "0" or words.get("Switches"):
            continue
        try:
            for node in expand(words.get("Nodes", "")):
                found.setdefault(node, name)
        except ParseError:
            return {}
        if len(found) > MAX_NODES:
            return {}
    return found
