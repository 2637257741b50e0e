"""The network of a large lab, in a small one: a router in place of the switch."""

from __future__ import annotations

import pytest
from lab_nodes import hostnames

from lab import Cluster, Lab, LabError

DIAL = """
import socket
try:
    socket.create_connection(("n2", 9), timeout=1)
except OSError as error:
    print(type(error).__name__)
"""


def dialled(lab: Lab) -> str:
    """Return the error when n1 connects to a port of n2 where nobody listens."""
    return lab.exec("n1", ["python", "-c", DIAL]).stdout.strip()


def test_nodes_behind_a_router_are_silent_when_cut_and_come_back() -> None:
    with Cluster(nodes=3, standby=1, router=True) as lab:
        assert hostnames(lab, 3) == ["n1", "n2", "n3"]
        assert dialled(lab) == "ConnectionRefusedError"
        lab.partition("n2")
        assert dialled(lab) == "TimeoutError"
        lab.heal("n2")
        assert dialled(lab) == "ConnectionRefusedError"
        lab.slow("n2", "100mbit")
        with pytest.raises(LabError, match="no switch"):
            lab.slow("n2", delay_ms=10)
        lab.crash("n2")
        assert dialled(lab) == "TimeoutError"
        lab.heal("n2")
        assert hostnames(lab, 3) == ["n1", "n2", "n3"]
