"""Leaf switches from what scontrol prints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint.planning.topology import leaves

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4],gpu7
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=gpu7,n[1-4] Switches=s[0-1]
"""
BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TREE, {"n1": "s0", "n2": "s0", "n3": "s1", "n4": "s1", "gpu7": "s1"}),
        (BLOCK, {"n1": "b1", "n2": "b1", "n3": "b2", "n4": "b2"}),
        ("BlockName=b1 BlockIndex=0 Nodes=n5\n", {"n5": "b1"}),
        ("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=\nSwitchName=s1 Level=0 Nodes=n1", {"n1": "s1"}),
        ("SwitchName=s0 Level=0 Nodes=rack[1-2]n[01-02]", {
            "rack1n01": "s0", "rack1n02": "s0", "rack2n01": "s0", "rack2n02": "s0"}),
        # Two leaf switches of one node: the first.
        ("SwitchName=s0 Level=0 Nodes=n1\nSwitchName=s1 Level=0 Nodes=n1", {"n1": "s0"}),
        # A site's script that prints the switches' children too.
        ("SwitchName=top Nodes=n[1-2] Switches=s0\nSwitchName=s0 Nodes=n[1-2]", {
            "n1": "s0", "n2": "s0"}),
        # A line cut short (SLURM_TOPO_LEN) still tells its level.
        ("SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n1\nSwitchName=s0 Level=0 Nodes=n1", {
            "n1": "s0"}),
        ("", {}),
        ("No topology information available\n", {}),
        ("slurm_load_topo error: Unable to contact slurm controller", {}),
        # Unreadable lists say nothing rather than half.
        ("SwitchName=s0 Level=0 Nodes=n[1-2\nSwitchName=s1 Level=0 Nodes=n3", {}),
        ("SwitchName=s0 Level=0 Nodes=n[1-999999999]", {}),
        ("SwitchName=s0 Level=0 Nodes=a[1-5000]b[1-5000]", {}),
    ],
)  # fmt: skip
def test_leaf_switches(text: str, expected: dict[str, str]) -> None:
    assert leaves(text) == expected


WORDS = ["SwitchName=s0", "BlockName=b", "Level=0", "Level=9", "Nodes=n[1-3]", "Nodes=@all",
         "Nodes=n[", "Nodes=[1-2]x", "Nodes=a,,b", "Switches=s[0-1]", "=", "\n", "Nodes=n[3-1]",
         "Nodes=n[1-3/0]", "Nodes=%s", "Nodes=n[0-9]!n5", "Nodes=n&m", "Nodes=n[-1]"]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=12))
def test_odd_text_never_raises(words: list[str]) -> None:
    found = leaves(" ".join(words))
    assert all(node and leaf for node, leaf in found.items())
