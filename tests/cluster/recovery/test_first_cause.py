"""A rank's last words and the catalogue of signatures: which nodes lose their place, which not."""

from __future__ import annotations

from typing import Any

from conftest import LabFactory
from jobs import Training, check_incident, prepared

from lab import Cluster, Lab

GRAPHICS = "NVRM: Xid (PCI:0000:17:00): 13, pid=7, Graphics SM Warp Exception: Out Of Range Address"
ILLEGAL = """Traceback (most recent call last):
  File "train.py", line 40, in <module>
    loss.backward()
RuntimeError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call.
"""
OFF = "NVRM: Xid (PCI:0000:17:00): 79, pid=7, GPU has fallen off the bus."
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]"
SITE = """[[signature]]
id = "riser"
pattern = 'riser card of (?P<node>\\S+) reports a fault'
cause = "A riser card is bad"
layer = "host_hardware"
blame = "node"
evict = "yes"
"""


def says(lab: Lab, words: str, toy: str = "", robust: str = "", site: str = "") -> Training:
    """Start 2 ranks on 2 nodes and a spare; rank 1 on n2 ends at step 8 with these last words."""
    training = prepared(lab, 2)
    (training.dir / "words").write_text(words)
    options = ["--robust-spares=1", *robust.split()]
    if site:
        (training.dir / "site.toml").write_text(site)
        options.append(f"--robust-signatures-file={training.dir}/site.toml")
    line = f"--fault says --words {training.dir}/words --at 8 {toy}"
    training.submit(training.line(options, line.split()), ["-N3", "--ntasks-per-node=1"])
    return training


def evidence(record: dict[str, Any]) -> str:
    return "\n".join(record["evidence"])


def test_a_programs_cuda_error_is_not_its_nodes_fault(lab: Cluster) -> None:
    training = says(lab, f"{GRAPHICS}\n{ILLEGAL}", "--epoch 0")
    assert training.wait_end() == 1, training.story()
    first, second = training.incidents()
    for record, action in ((first, "restart"), (second, "stop")):
        check_incident(record, cause="user", action=action, suspects=[], swaps=[])
        assert record["evidence"][:2] == ["rank 1 on n2: exit code 1", GRAPHICS]
        assert "(xid-user)" in evidence(record)
    assert not training.accusations()
    training.check_gone()


def test_a_gpu_off_the_bus_costs_its_node(new_lab: LabFactory) -> None:
    training = says(new_lab(standby=0), f"{OFF}\n{CLOSED}\n")
    training.check_done()
    record = training.only_incident(cause="node", action="swap_spare", suspects=["n2"])
    assert record["swaps"] == [["n2", "n3"]]
    assert OFF in record["evidence"] and "(xid-off-bus)" in evidence(record)
    assert OFF in training.accusations()["n2"]["evidence"]


def test_an_echo_of_another_ranks_end_costs_no_node(lab: Cluster) -> None:
    toy = "--epoch 1,2 --save 100"  # twice without progress
    training = says(lab, f"{CLOSED}\n", toy)
    training.check_done()
    for record in training.incidents():
        check_incident(record, cause="transient", action="restart", suspects=[], swaps=[])
        assert CLOSED in record["evidence"]
    assert len(training.incidents()) == 2 and not training.accusations()


def test_a_sites_own_pattern_decides(new_lab: LabFactory) -> None:
    lab = new_lab(standby=0)
    other = says(lab, "riser card of n1 reports a fault\n", site=SITE)  # not the rank's own node
    other.check_done()
    record = other.only_incident(cause="transient", action="restart", suspects=[], swaps=[])
    assert "A riser card is bad (riser)" in record["evidence"] and not other.accusations()
    own = says(lab, "riser card of n2 reports a fault\n", site=SITE)
    own.check_done()
    record = own.only_incident(cause="node", action="swap_spare", suspects=["n2"])
    assert "points to the node: A riser card is bad (riser)" in record["evidence"]
