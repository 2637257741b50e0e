"""The reading of a rank's end: the line that names the cause, by the catalogue."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from places import REPOSITORY

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.ends import MOST, EndKind, read_end
from srun_wrapper.decide.failure import Failure
from srun_wrapper.signatures.catalogue import load

DATA = REPOSITORY / "tests" / "data" / "failures"
LINES = [line.split("|", 1)[1] for line in (DATA / "lines.txt").read_text().splitlines()]
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OFF = "NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus."
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]"
VALUE = "ValueError: bad sample 7"
STEPS = "".join(f"step {n} loss 1.0\n" for n in range(1, 5))


def end_of(tail: str, signum: int | None = None, node: str = "n1") -> Failure:
    code = None if signum else 1
    return Failure("crash", 10.0, 9.0, node, 2, code, signum, tail)


@pytest.mark.parametrize(
    ("tail", "signum", "kind", "named"),
    [
        (ECC, None, EndKind.MACHINE, "ecc"),
        (ECC, signal.SIGABRT, EndKind.MACHINE, "ecc"),
        (ECC, signal.SIGKILL, EndKind.MACHINE, "ecc"),  # the machine's own words
        (f"{VALUE}\n{ECC}\n{CLOSED}", None, EndKind.MACHINE, "ecc"),
        (f"n1.site.org:7:7 [0] NCCL WARN {ECC}", None, EndKind.MACHINE, "ecc"),
        (f"n2:7:7 [0] NCCL WARN {ECC}", None, EndKind.FOLLOWS, "ecc"),  # about another node
        (f"n2:7:7 [0] NCCL WARN {ECC}", signal.SIGTERM, EndKind.OWN, ""),
        (f"{STEPS}{VALUE}\n{STEPS}", None, EndKind.OWN, "python-error"),  # no step after it
        (f"step 1\n{VALUE}\nstep 2\nstep 3\nstep 4\n", None, EndKind.OWN, ""),  # survived
        (VALUE, None, EndKind.OWN, "python-error"),
        (VALUE, signal.SIGKILL, EndKind.OWN, ""),  # an error that was caught long before
        (VALUE, signal.SIGSEGV, EndKind.OWN, ""),
        (CLOSED, None, EndKind.FOLLOWS, "peer-closed"),
        (f"{CLOSED}\n{VALUE}", None, EndKind.OWN, "python-error"),
        ("OSError: [Errno 110] Connection timed out", None, EndKind.FOLLOWS, "socket-timeout"),
        ("NET/IB : Got completion from peer n2<5> with status=12", None, EndKind.FOLLOWS, None),
        ("Segmentation fault (core dumped)", signal.SIGSEGV, EndKind.OWN, ""),
        ("", signal.SIGKILL, EndKind.OWN, ""),
        ("last words", None, EndKind.OWN, ""),
    ],
)
def test_the_end_of_a_rank(tail: str, signum: int | None, kind: EndKind, named: str | None) -> None:
    end = read_end(end_of(tail, signum))
    assert end.kind is kind
    if named is not None:
        assert (end.hit.signature.id if end.hit else "") == named


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("signum", [None, signal.SIGKILL, signal.SIGABRT])
def test_no_line_evicts_its_node_at_once_but_by_evict_yes(line: str, signum: int | None) -> None:
    failure = end_of(line, signum)
    found, end = diagnose([failure], 2), read_end(failure)
    if found.cause == "node":
        assert end.hit is not None and end.hit.signature.evict == "yes"
        assert end.hit.node in ("", "n1") and found.suspects == ("n1",)
    else:
        assert found.suspects == ()


def test_a_line_that_names_another_node_evicts_nobody(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        "[[signature]]\nid = 'psu'\npattern = 'PSU of (?P<node>\\S+) lost'\ncause = 'A PSU'\n"
        "layer = 'host_hardware'\nblame = 'node'\nevict = 'yes'\n"
    )
    catalogue = load(site)
    for node, cause, suspects in (("n1", "node", ("n1",)), ("n2", "transient", ())):
        found = diagnose([end_of(f"PSU of {node} lost")], 2, (), catalogue)
        assert (found.cause, found.suspects) == (cause, suspects)
    assert diagnose([end_of("PSU of n1 lost")], 2).cause == "user"  # without the site's file


def test_thousands_of_ends_are_not_all_read() -> None:
    failures = [end_of(f"{CLOSED}:{n}", node=f"n{n}") for n in range(5000)]
    reads = read_end_misses()
    assert diagnose(failures, 5000).cause == "transient"
    assert read_end_misses() - reads == MOST


def read_end_misses() -> int:
    from srun_wrapper.decide import ends

    return ends._read.cache_info().misses


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 130), (3000, 1), (1000, 8)])
def test_a_command_that_nobody_can_run_is_no_nodes_fault_however_many_they_are(
    nodes: int, per_node: int
) -> None:
    """The diagnosis saw only the first 128 ends: nodes were reported and replaced for a typo."""
    failures = [
        Failure("crash", 1.0 + node, 0.9, f"n{node}", node * per_node + local, code=2,
                tail="no such file", launched=False)
        for node in range(nodes)
        for local in range(per_node)
    ]  # fmt: skip
    found = diagnose(failures, nodes)
    assert (found.rule, found.cause, found.suspects) == ("cannot-start", "user", ())
