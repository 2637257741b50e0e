"""nccl-tests: the text of its versions (by their format strings), runs that fail or hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from places import TESTS

from health.active.nvidia import nccl_tests, tools
from health.active_tests import Measured, measured

DATA = TESTS / "data" / "active"


def read(name: str, program: str = "all_reduce_perf", code: int = 0) -> Measured:
    return nccl_tests.read(program, (DATA / name).read_text(), code=code)


@pytest.mark.parametrize(
    ("name", "busbw"),
    [
        ("nccl_tests_2.9_all_reduce.txt", 189.17),
        ("nccl_tests_2.13_all_reduce.txt", 359.58),
        ("nccl_tests_2.19_all_reduce.txt", 359.58),
    ],
)
def test_bandwidths_of_every_version(name: str, busbw: float) -> None:
    one = read(name)
    assert (one.test, one.error, one.wrong) == ("local", "", ())
    assert one.values["nccl_tests_busbw_gbps"] == busbw
    # busbw = algbw * 2(n-1)/n with n = 4
    assert one.values["nccl_tests_algbw_gbps"] * 1.5 == pytest.approx(busbw, rel=1e-3)
    assert measured(one.as_dict()) == one


def test_alltoall_has_values_of_its_own_and_no_check_in_place() -> None:
    one = read("nccl_tests_2.13_alltoall.txt", "alltoall_perf")
    assert one.values == {
        "nccl_tests_alltoall_algbw_gbps": 335.87,
        "nccl_tests_alltoall_busbw_gbps": 251.9,
    }
    assert (one.wrong, one.error) == ((), "")


def test_wrong_values_are_proof_whatever_the_exit_code() -> None:
    one = read("nccl_tests_2.13_wrong.txt", code=1)
    assert one.wrong == ("nccl-tests all_reduce_perf: 37 wrong values at 268435456 bytes (#wrong)",)
    assert one.error == ""
    text = (DATA / "nccl_tests_2.9_all_reduce.txt").read_text().replace(": 0 OK", ": 5 FAILED")
    assert nccl_tests.read("all_reduce_perf", text).wrong == (
        "nccl-tests all_reduce_perf: 5 values out of bounds",
    )


@pytest.mark.parametrize(
    ("out", "err", "code", "cut", "words"),
    [
        ((DATA / "nccl_tests_2.13_no_start.txt").read_text(), "", 2, "",
         "Test CUDA failure common.cu:844 'invalid device ordinal'"),
        ("", "all_reduce_perf: error while loading shared libraries: libnccl.so.2", 127, "",
         "error while loading shared libraries"),
        ("n7:1:1 [0] transport/net.cc:40 NCCL WARN Bootstrap : no socket interface found\n", "",
         3, "", "NCCL WARN Bootstrap : no socket interface found"),
        ((DATA / "nccl_tests_2.13_all_reduce.txt").read_text(), "", None,
         "did not end within 9 s", "did not end within 9 s"),
        ((DATA / "nccl_tests_2.13_all_reduce.txt").read_text().partition("# Out")[0], "", -11, "",
         "exit code -11"),
        ("", "", 0, "", "exit code 0, no results"),
    ],
)  # fmt: skip
def test_what_could_not_run_is_an_error_and_proves_nothing(
    out: str, err: str, code: int | None, cut: str, words: str
) -> None:
    one = nccl_tests.read("all_reduce_perf", out, err, code, cut)
    assert words in one.error and (one.wrong, one.values) == ((), {})


def test_lines_of_others_between_are_no_results() -> None:
    text = (DATA / "nccl_tests_2.13_wrong.txt").read_text()
    assert [(row.size, row.wrong) for row in nccl_tests.rows(text)] == [(268435456, 37)]
    assert nccl_tests.rows("1 2 3 4 5 6 7 8 9 10 11 12 13\n") == []  # no head before it
    assert nccl_tests.rows("# size busbw\n1 2 3\n") == []  # a head that we do not know


def fake(directory: Path, program: str, lines: str) -> None:
    """A stand-in for a program of nccl-tests, which needs CUDA."""
    script = directory / f"fake_{program}"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    (directory / program).symlink_to(script)


def test_both_are_run_within_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "1000")
    said = f'echo "$@ $NCCL_TESTS_MIN_BW" >> {tmp_path}/args; cat {DATA}'
    fake(tmp_path, "all_reduce_perf", f"{said}/nccl_tests_2.13_all_reduce.txt")
    fake(tmp_path, "alltoall_perf", "exit 3")
    (one, other), left_out = nccl_tests.run(
        60.0, gpus=4, node="n7", model="NVIDIA H100", directories=[str(tmp_path)]
    )
    assert (tmp_path / "args").read_text() == "-g 4 -b 256M -e 256M -w 5 -n 20 -c 1 \n"
    assert (one.node, one.model, one.values["nccl_tests_busbw_gbps"]) == (
        "n7",
        "NVIDIA H100",
        359.58,
    )
    assert not left_out
    assert other.error == "nccl-tests alltoall_perf: exit code 3, no results"


def test_one_that_hangs_takes_no_time_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_tests, "_LEAST_S", 0.1)
    fake(tmp_path, "all_reduce_perf", "trap '' TERM; sleep 60")
    fake(tmp_path, "alltoall_perf", f"cat {DATA}/nccl_tests_2.13_alltoall.txt")
    (one, other), _ = nccl_tests.run(6.0, gpus=2, directories=[str(tmp_path)])
    assert "did not end within" in one.error and one.seconds < 6
    assert other.values["nccl_tests_alltoall_busbw_gbps"] == 251.9


def test_where_there_is_no_time_or_nothing_to_measure(tmp_path: Path) -> None:
    fake(tmp_path, "all_reduce_perf", "exit 0")
    assert nccl_tests.run(1.0, gpus=2, directories=[str(tmp_path)]) == (
        [],
        ["nccl-tests all_reduce_perf: 1 s left, it needs 5"],
    )
    assert nccl_tests.run(60.0, gpus=1, directories=[str(tmp_path)]) == ([], [])
    (tmp_path / "none").mkdir()
    if not tools.find("all_reduce_perf", nccl_tests.PLACES):
        assert nccl_tests.run(60.0, gpus=8, directories=[str(tmp_path / "none")]) == ([], [])


def test_root_takes_only_what_nobody_else_can_have_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.fstat", _as_roots(os.getuid()))
    fake(tmp_path, "tool", "exit 0")
    found = str(tmp_path / "tool")
    assert tools.find("tool", [str(tmp_path)]) == found
    (tmp_path / "fake_tool").chmod(0o777)
    assert tools.find("tool", [str(tmp_path)]) == ""
    (tmp_path / "fake_tool").chmod(0o755)
    tmp_path.chmod(0o777)
    assert tools.find("tool", [str(tmp_path)]) == ""
    tmp_path.chmod(0o755)
    if os.getuid() == 0:
        os.chown(tmp_path / "fake_tool", 65534, -1)
        assert tools.find("tool", [str(tmp_path)]) == ""


def _as_roots(uid: int) -> Callable[[int], os.stat_result]:
    """``os.fstat`` for a test that is not run by root: what is ours is root's."""
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        info = real(fd)
        owner = 0 if info.st_uid == uid else info.st_uid
        return os.stat_result((*info[:4], owner, *info[5:10]))

    return fstat
