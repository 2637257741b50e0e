"""Node names and host lists of every shape that Slurm takes, through all that reads and writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from robust_slurm import hostlist
from robust_slurm.slurm import values
from srun_wrapper.command.rank_env import fold_hosts

# A list as Slurm or an operator writes it; its names; the same as one argument of a command.
SHAPES = [
    ("n[1-3,7]", "n1 n2 n3 n7", "n[1-3,7]"),
    ("n[1-3,07]", "n1 n2 n3 n07", "n[1-3,07]"),
    ("n[7,07,007]", "n7 n07 n007", "n[7,07,007]"),
    ("n[8-11]", "n8 n9 n10 n11", "n[8-11]"),
    ("n[08-11]", "n08 n09 n10 n11", "n[08-11]"),
    ("n[098-101]", "n098 n099 n100 n101", "n[098-101]"),
    ("n[0-0]", "n0", "n0"),
    ("n[000-002]", "n000 n001 n002", "n[000-002]"),
    ("r[0-1]n[01-02]", "r0n01 r0n02 r1n01 r1n02", "r0n[01-02],r1n[01-02]"),
    ("r[0-1]-n[9-10]", "r0-n9 r0-n10 r1-n9 r1-n10", "r0-n[9-10],r1-n[9-10]"),
    ("n[1-2]-[1-2]", "n1-1 n1-2 n2-1 n2-2", "n1-[1-2],n2-[1-2]"),
    ("[1-3]", "1 2 3", "[1-3]"),
    ("1,2,3", "1 2 3", "[1-3]"),
    ("login", "login", "login"),
    ("login,gpu-a.cluster", "login gpu-a.cluster", "login,gpu-a.cluster"),
    ("a-b.c-[1-2]", "a-b.c-1 a-b.c-2", "a-b.c-[1-2]"),
    ("a_b[1-2]", "a_b1 a_b2", "a_b[1-2]"),
    ("N[1-2],n[1-2]", "N1 N2 n1 n2", "N[1-2],n[1-2]"),
    ("n1e3,n1e4", "n1e3 n1e4", "n1e[3-4]"),
    ("m4,n[1-2],q,m2", "m4 n1 n2 q m2", "m[2,4],n[1-2],q"),
    ("n1-ib,n2-ib", "n1-ib n2-ib", "n1-ib,n2-ib"),
    ("x1y3z,x1y4z,n[1-2]", "x1y3z x1y4z n1 n2", "n[1-2],x1y3z,x1y4z"),
]
LISTS = [pytest.param(text, names.split(), argument, id=text) for text, names, argument in SHAPES]


@pytest.mark.parametrize(("text", "names", "argument"), LISTS)
def test_every_reader_and_writer(text: str, names: list[str], argument: str) -> None:
    assert hostlist.expand(text) == names
    assert values.expand(text) == tuple(names)
    assert all(hostlist.contains(text, name) for name in names)
    assert not any(hostlist.contains(text, f"{name}0") for name in names if f"{name}0" not in names)
    assert values.fold(names) == argument
    assert sorted(values.expand(argument)) == sorted(names)
    assert hostlist.expand(fold_hosts(names)) == names, "in the order of the ranks"


@pytest.mark.slow
def test_a_large_list_keeps_its_zeros() -> None:
    names = hostlist.expand("rack[0-2]-node[001-999]")
    assert (len(names), names[0], names[-1]) == (2997, "rack0-node001", "rack2-node999")
    assert values.fold(names) == ",".join(f"rack{i}-node[001-999]" for i in range(3))
    assert fold_hosts(names) == values.fold(names)


@pytest.mark.parametrize(
    "text", ["n[1-2", "n[]", "n[1-2]]", "n[a-b]", "n[3-1]", "n[[1-2]]", "n[1-70000]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        hostlist.expand(text)
    with pytest.raises(values.ParseError, match="not a node list"):
        values.expand(text)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol")
def test_slurm_reads_what_is_written(tmp_path: Path) -> None:
    """22.05 does not read text behind a bracket, so none is written."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    for _, text, _ in SHAPES:
        names = text.split()
        for written in (values.fold(names), fold_hosts(names)):
            run = subprocess.run(
                ["scontrol", "show", "hostnames", written],
                env={**os.environ, "SLURM_CONF": str(conf)},
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            assert sorted(run.stdout.split()) == sorted(names), written
