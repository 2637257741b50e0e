"""Full file systems of a lab's nodes, and what a lab without GPUs can break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_nodes import free, log

from lab import Cluster, LabError


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0) as made:
        yield made


def test_fill_tmp(lab: Cluster) -> None:
    total, before = free(lab, "/tmp")
    assert total == 256 << 20
    lab.fill("n1", "/tmp")
    assert free(lab, "/tmp") == [total, 0]
    write = lab.exec("n1", ["python", "-c", "open('/tmp/more', 'wb', 0).write(b'x')"])
    assert "No space left" in write.stderr
    assert free(lab, "/tmp", "n2")[1] > 200 << 20
    lab.fill("n1", "/tmp", leave="5%")
    assert 0 <= free(lab, "/tmp")[1] - 0.05 * total <= 8192
    lab.fill("n1", "/tmp", leave=1 << 20)
    assert free(lab, "/tmp")[1] == 1 << 20
    assert lab.faults()["n1"] == "full:/tmp"
    lab.heal("n1")
    assert free(lab, "/tmp")[1] >= before - 8192


def test_fill_what_is_large_or_slurms_or_not_the_nodes(lab: Cluster) -> None:
    before = free(lab, "/dev/shm")
    lab.fill("n1", "/dev/shm")
    lab.fill("n1", lab.spec.spool)
    assert free(lab, "/dev/shm") == [256 << 20, 0]
    assert free(lab, str(lab.spec.spool))[1] == 0
    lab.heal("n1")
    assert free(lab, "/dev/shm") == before
    for path in ("/", "/etc", str(lab.shared), "/run"):
        with pytest.raises(LabError, match="not on a file system of the node's own"):
            lab.fill("n1", path)
    with pytest.raises(LabError, match="No such file"):
        lab.fill("n1", "/tmp/none")
    with pytest.raises(LabError, match="from the root"):
        lab.fill("n1", "tmp")


def test_a_lab_without_gpus_has_its_own_log_and_no_more() -> None:
    with Cluster(nodes=1, standby=0) as lab:
        assert log(lab)[0].startswith("5,0,0,-;Linux version")
        lab.kmsg("n1", "hello")
        assert log(lab)[-1].endswith(";hello")
        lab.fill("n1")
        assert lab.exec("n1", ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
        lab.stale_mount("n1")
        assert lab.faults()["n1"] == f"full:/tmp+stale:{lab.scratch}"
        lab.heal("n1")
        assert lab.faults()["n1"] == "up"
        for call in (lambda: lab.gpu("n1", 0, xid=79), lambda: lab.link("n1", up=False)):
            with pytest.raises(LabError, match="--gpus N"):
                call()
        with pytest.raises(LabError, match="one line"):
            lab.kmsg("n1", "two\nlines")
