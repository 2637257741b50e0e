"""The process that reads the GPUs' error counters: whatever it does, robust-task goes on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from waiting import until

from lab.machine import fake_nvml
from srun_wrapper.agent.counters import gpus
from srun_wrapper.agent.counters.gpus import GpuReader, parse
from srun_wrapper.agent.counters.watch import Counters
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.looking_messages import Machine
from srun_wrapper.protocol.messages import Exited, Stop, Stopped

drivers, drive = slot_driver.drivers, slot_driver.drive
needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="builds the fake NVML")
GPU = "GPU 0000:1b:00.0"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "version"
    path.touch()
    return path


class Readings:
    """A reader in a loop, and what it has read; ``code``: the Python that reads."""

    def __init__(self, driver: Path, code: str, seconds: float = 10.0) -> None:
        self.loop = Loop()
        self.found: list[dict[str, int]] = []
        self.reader = GpuReader(self.loop, (sys.executable, "-S", "-c", code), driver, seconds)

    def read(self) -> dict[str, int]:
        number = len(self.found)
        self.reader.read(self.found.append)

        def turned() -> bool:
            self.loop.turn(0.01)
            process_tree.reap()
            return len(self.found) > number

        until(turned, "the reading", 20.0)
        return self.found[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('{\"a\": 1}'); print('{\"b\": 2}'); print('{}')", {"a": 1, "b": 2}),
        ("print('{\"a\": 1}'); print('{}'); print('{\"b\": 2}')", {"a": 1}),
        ("print('{\"a\": 1}', flush=True); import os; os.abort()", {"a": 1}),
        ("print('{\"a\": 1}', end='')", {}),
        ("raise SystemExit(1)", {}),
        ("print('{\"a\": ' + '9' * 5000 + '}')", {}),
    ],
)
def test_what_it_has_said_counts_however_it_ends(
    driver: Path, caplog: pytest.LogCaptureFixture, code: str, expected: dict[str, int]
) -> None:
    readings = Readings(driver, code)
    assert readings.read() == expected
    assert gpus.processes() == [] and caplog.records == []


def test_no_process_is_started_without_a_driver(tmp_path: Path) -> None:
    readings = Readings(tmp_path / "none", f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert readings.read() == {}
    assert not (tmp_path / "ran").exists()


def test_one_that_cannot_be_started_reads_nothing(driver: Path) -> None:
    readings = Readings(driver, "")
    readings.reader._command = ("/nonexistent/python",)
    assert readings.read() == {}
    assert gpus.processes() == []


def test_what_a_call_that_hangs_had_before_it_counts_and_it_is_killed(
    driver: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import time; print('{\"a\": 1}', flush=True); time.sleep(60)"
    readings = Readings(driver, code, seconds=2.0)
    began = time.monotonic()
    assert readings.read() == {"a": 1}
    assert time.monotonic() - began < 15
    assert [r.message for r in caplog.records] == ["NVML gave no answer within 2 s"]
    assert gpus.processes() == [] and not readings.reader.left_behind


def test_after_one_that_cannot_be_killed_nvml_is_asked_no_more(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_tree, "send", lambda _pids, _signum: None)
    monkeypatch.setattr(gpus, "GONE", 0.1)
    monkeypatch.setattr(gpus, "_starts", [])
    ran = tmp_path / "ran"
    code = f"import time; open({str(ran)!r}, 'a').write('x'); time.sleep(60)"
    readings = Readings(driver, code, seconds=1.0)
    assert readings.read() == {} and readings.read() == {}
    assert ran.read_text() == "x"
    (pid,) = gpus.processes()  # the slot does not wait for it
    (record,) = caplog.records
    assert "GPUs are not read any more" in record.message
    os.kill(pid, 9)
    until(lambda: pid in process_tree.reap(), "its end")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{}", {}),
        (b"[1]", {}),
        (b"[" * 200_000, {}),
        (b'{"a": 1, "b\\nb": 2, "\\ud800": 3, "\\u202e": 4}', {"a": 1}),
        (b"\xff", {}),
        (b'{"a": 1, "b": -1, "c": true, "d": 1.5, "e": 9223372036854775808}', {"a": 1}),
        (json.dumps({"x" * 500: 2}).encode(), {"x" * gpus.WORD: 2}),
    ],
)
def test_only_counters_are_taken(line: bytes, expected: dict[str, int]) -> None:
    assert parse(line) == expected


@pytest.mark.slow
def test_a_stop_of_the_ranks_neither_kills_the_process_nor_waits_for_it(
    drive: Any, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    code = f"import time; open({str(said)!r}, 'w').close(); time.sleep(60)"
    d = drive("sleep", "60", gpu_reader=[sys.executable, "-S", "-c", code])
    d.launch()
    d.wait(said.exists)
    began = time.monotonic()
    d.order(Stop(1, 0.0))
    d.get(Stopped)
    assert time.monotonic() - began < 5 and len(d.below()) == 1
    assert not [e for e in d.events if isinstance(e, Exited)]


def test_gpus_that_do_not_answer_hold_up_no_other_counters() -> None:
    loop, told = Loop(), []
    values = iter((1, 4))
    asked: list[Callable[[dict[str, int]], None]] = []
    counters = Counters(loop, told.append, lambda: {"a": next(values)}, Machine, asked.append)

    def turn_until(met: Callable[[], bool]) -> None:
        until(lambda: loop.turn(0.01) or met(), "the reading", 5.0)

    turn_until(lambda: counters._last == {"a": 1})
    counters.start_reading()
    turn_until(lambda: told == [{"a": 3}])
    assert len(asked) == 1
    asked[0]({"g": 5})
    assert len(asked) == 2  # what was asked for meanwhile
    asked[1]({"g": 7})
    assert told == [{"a": 3}, {"a": 3, "g": 2}]


def test_growth_of_the_host_does_not_redeem_the_promise_of_the_gpus() -> None:
    loop, told = Loop(), []
    values = iter((1, 4))
    asked: list[Callable[[dict[str, int]], None]] = []

    def tell(grown: dict[str, int]) -> None:
        told.append((grown, counters.promised))

    counters = Counters(loop, tell, lambda: {"a": next(values)}, Machine, asked.append)
    until(lambda: loop.turn(0.01) or counters._last == {"a": 1}, "the first reading", 5.0)
    asked[0]({"g": 5})
    counters.start_reading()
    assert counters.promise()
    until(lambda: loop.turn(0.01) or told, "the host's", 5.0)
    asked[1]({"g": 5})
    assert told == [({"a": 3}, True), ({"a": 3}, False)]


# -- with the real pynvml


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(
    library: Path, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], dict[str, int]]]:
    """Read with this state of the fake."""
    pytest.importorskip("pynvml")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    readings = Readings(driver, "")
    readings.reader = GpuReader(readings.loop, driver=driver, seconds=20.0)

    def read(state: str) -> dict[str, int]:
        library.with_name("nvml.state").write_text(state)
        return readings.read()

    yield read


STATE = """
count = 1
gpu.ecc.volatile_uncorrected = 1
gpu.ecc.volatile_corrected = 8
gpu.remap.uncorrected = 2
gpu.remap.failed = 1
gpu.pcie.replays = 4
gpu.violation.thermal = 3999999999
gpu.nvlink.count = 2
gpu0.nvlink1.active = 0
gpu0.nvlink0.crc_flit = 6
"""


@pytest.mark.slow
@needs_cc
def test_all_counters_of_a_gpu(nvml: Callable[[str], dict[str, int]]) -> None:
    assert nvml(STATE) == {
        f"{GPU} {name}": value
        for name, value in {
            "uncorrected ECC errors": 1,
            "corrected ECC errors": 8,
            "rows remapped after uncorrected errors": 2,
            "rows remapped after corrected errors": 0,
            "failed row remappings": 1,
            "PCIe replays": 4,
            "seconds slowed down by heat": 3,
            "NVLink 0 link_downed": 0,
            "NVLink 1 link_downed": 1,
            "NVLink 0 replay errors": 0,
            "NVLink 0 recovery errors": 0,
            "NVLink 0 crc_flit errors": 6,
            "NVLink 0 crc_data errors": 0,
        }.items()
    }


REFUSED = "NVML_ERROR_NOT_SUPPORTED"
DENIED = "NVML_ERROR_NO_PERMISSION"


@pytest.mark.slow
@needs_cc
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (  # a board without ECC and NVLink, a user without the right
            f"count=1\ngpu.ecc.volatile_uncorrected={REFUSED}\ngpu.nvlink.count=0\n"
            f"gpu.ecc.volatile_corrected={REFUSED}\ngpu.remap.corrected={REFUSED}\n"
            f"gpu.violation.thermal={DENIED}\ngpu.pcie.replays=0\n",
            {f"{GPU} PCIe replays": 0},
        ),
        ("count=1\ngpu0.lost=handle\n", {}),
        ("count=1\ngpu0.lost=calls\n", {}),
        ("init=NVML_ERROR_DRIVER_NOT_LOADED\n", {}),
        ("count=0\n", {}),
    ],
)
def test_what_is_not_given_is_absent_and_not_zero(
    nvml: Callable[[str], dict[str, int]], state: str, expected: dict[str, int]
) -> None:
    assert nvml(state) == expected


@needs_cc
def test_gpus_before_and_after_a_lost_one_are_read(nvml: Callable[[str], dict[str, int]]) -> None:
    found = nvml("count=3\ngpu1.lost=calls\n")
    assert len({name.split()[1] for name in found}) == 2


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
