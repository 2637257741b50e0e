"""docs/timings.md has all limits as they are in the code, and those that hang together do."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from robust_slurm.data.exchange import link, server
from robust_slurm.data.service import client, producer
from robust_slurm.settings import FIELDS
from srun_wrapper.agent import launch
from srun_wrapper.agent.connections import uplink
from srun_wrapper.agent.data import data_process, pings
from srun_wrapper.agent.processes import emptying, stop_stages
from srun_wrapper.checkpoints import durable_steps, flushing
from srun_wrapper.detect import hang_watch, inspections, node_watch
from srun_wrapper.recover import settling

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "timings.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z_]+) \| ([\d.]+) \| .+ \| `(.+)\.py` \|$", PAGE, re.MULTILINE)

PAUSES = {
    "robust_slurm/auto/listening": "_LOOK _SPREAD",
    "robust_slurm/auto/sources": "IDLE",
    "robust_slurm/checkpoint/copying/watch": "LEAST_PAUSE",
    "robust_slurm/checkpoint/store/awaited": "TELL",
    "robust_slurm/checkpoint/store/disk/writing": "_LOOK",
    "robust_slurm/checkpoint/store/ranks": "EVERY",
    "robust_slurm/checkpoint/training/by_time": "LOOK",
    "robust_slurm/checkpoint/training/unanswered": "PAUSE",
    "robust_slurm/checkpoint/transfer/fetching": "PAUSE",
    "robust_slurm/checkpoint/transfer/pusher": "REFUSED_PAUSE",
    "robust_slurm/command_line/progress": "AFTER_S _EVERY_S",
    "robust_slurm/data/exchange/link": "RETRY",
    "robust_slurm/data/lanes/local": "TURN",
    "robust_slurm/data/loader": "SHORT",
    "robust_slurm/data/service/client": "TURN",
    "robust_slurm/data/service/figures": "EVERY WINDOW",
    "robust_slurm/data/service/main": "_SWITCH",
    "robust_slurm/data/service/producer": "WAIT",
    "robust_slurm/data/service/readers/main": "LOOK",
    "robust_slurm/data/service/readers/pool": "LOOK",
    "robust_slurm/data/service/readers/reader": "TRIM",
    "robust_slurm/data/service/readers/staff": "TICK",
    "robust_slurm/data/service/server": "PAUSE",
    "robust_slurm/data/sources/listing": "TURN",
    "robust_slurm/data/sources/turn": "LONG",
    "robust_slurm/frames/lobby": "_PAUSE",
    "robust_slurm/rejoin/offer": "AGAIN",
    "robust_slurm/slurm/child": "_REAP_S",
    "robust_slurm/slurm/command": "_RETRY_PAUSE_S _LEAST_S",
    "robust_slurm/slurm/run": "_REAP_S",
    "srun_wrapper/agent/counters/gpus": "GONE",
    "srun_wrapper/agent/data/news": "LEAST REPEAT",
    "srun_wrapper/agent/launch": "LOOK",
    "srun_wrapper/agent/looking/fallback": "QUIET",
    "srun_wrapper/agent/loop": "SPARED",
    "srun_wrapper/agent/node_files": "AGAIN AGAIN_STALLED",
    "srun_wrapper/agent/processes/guardian": "LOOK",
    "srun_wrapper/agent/processes/handler_work": "EVERY",
    "srun_wrapper/agent/processes/rank_facts": "READ_S",
    "srun_wrapper/agent/processes/signals": "AGAIN",
    "srun_wrapper/agent/task_log": "WINDOW",
    "srun_wrapper/agent/warm/imports": "LOOK",
    "srun_wrapper/checkpoints/schedule": "TELL",
    "srun_wrapper/code/cli": "LOOK",
    "srun_wrapper/code/requests": "LEASE",
    "srun_wrapper/command/in_force": "NEVER",
    "srun_wrapper/detect/guard": "TICK",
    "srun_wrapper/detect/node_watch": "ASK_AGAIN",
    "srun_wrapper/detect/stalls": "AGAIN",
    "srun_wrapper/job/data": "WINDOW LONGEST SHORT",
    "srun_wrapper/job/reporting/chronicle": "SHORTEST",
    "srun_wrapper/job/reporting/on_incident": "LOOK",
    "srun_wrapper/job/reporting/report": "PATIENCE",
    "srun_wrapper/job/state": "SLOWEST",
    "srun_wrapper/protocol/server": "HELD_UP",
    "srun_wrapper/recover/flaps": "LOOK",
    "srun_wrapper/recover/resize/growth": "AGAIN",
    "srun_wrapper/recover/resize/standing": "AGAIN",
    "srun_wrapper/recover/standby/leases": "EVERY RARELY",
    "srun_wrapper/recover/standby/needed": "AGAIN",
    "srun_wrapper/recover/standby/nodes": "LOOK",
    "srun_wrapper/replay/small_worlds": "TICK",
    "srun_wrapper/requeue/slurm_wait": "REPORT_EVERY LOOK",
    "srun_wrapper/supervisor/first_world": "DOUBT LATER",
}
"""Constants in seconds that decide nothing: pauses, repeated messages, what is shown."""
UNIT = re.compile(r"(s|[Ss]econds)\b")


def seconds_of(path: Path) -> Iterator[str]:
    """Yield the names of a module's numbers that are in seconds, by a comment or by name."""
    text = path.read_text(encoding="utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    for node, after in zip_longest(body, body[1:]):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                pass
            case _:
                continue
        number = isinstance(value, (ast.Constant, ast.BinOp)) and not any(
            isinstance(part, ast.Name) or isinstance(getattr(part, "value", None), (str, bytes))
            for part in ast.walk(value)
        )
        match after:
            case ast.Expr(value=ast.Constant(value=str(words))):
                pass
            case _:
                words = ""
        said = (lines[node.end_lineno - 1].partition("#")[2].strip(), words)
        in_seconds = name.endswith("_S") or any(
            re.match(r"(s|[Ss]econds)\b", each) for each in said
        )
        if number and name.strip("_").isupper() and in_seconds:
            yield name


@pytest.mark.parametrize("room", ["robust_slurm", "srun_wrapper"])
def test_every_limit_of_the_job_is_on_the_page(room: str) -> None:
    listed = {(name, file) for name, _, file in ROWS}
    listed |= {(name, file) for file, names in PAUSES.items() for name in names.split()}
    found = {
        (name, path.relative_to(REPOSITORY).with_suffix("").as_posix())
        for path in (REPOSITORY / room).rglob("*.py")
        for name in seconds_of(path)
    }
    assert found - listed == set(), "give each a row of docs/timings.md, or name it in PAUSES"
    pauses = {(n, file) for file, names in PAUSES.items() for n in names.split()}
    assert {each for each in pauses - found if each[1].startswith(room)} == set(), "these are gone"


@pytest.mark.parametrize(("name", "seconds", "file"), ROWS)
def test_a_limit_is_as_the_page_says(name: str, seconds: str, file: str) -> None:
    module = importlib.import_module(file.replace("/", "."))
    assert getattr(module, name) == float(seconds)


def test_the_settings_that_the_page_names_exist() -> None:
    slow = PAGE.partition("## On a slow cluster")[2].partition("## Fixed limits")[0]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", slow)) - {"robust_slurm"}
    assert len(ROWS) > 60 and named and named <= FIELDS.keys()


def test_limits_that_hang_together() -> None:
    assert FIELDS["stop_margin"].metadata["minimum"] > emptying.KILL_DEADLINE
    assert durable_steps.GIVEN_UP > flushing.END  # a step is over only after its writing is
    assert max(node_watch.PROBED_AGAIN) < node_watch.PROBE_TIMEOUT
    assert node_watch.LONG > uplink.QUIET  # an agent has had time to connect again
    assert launch.MOUNT < settling.SETTLE_MAX  # nodes that wait for a mount are judged together
    assert inspections.REPLY > hang_watch.WINDOW + stop_stages.ABORTING
    # A stopped data process is killed before its ranks give it up; another has time to come back.
    assert pings.EVERY * (pings.MOST + 1) < client.SILENCE < client.PATIENCE < client.START
    assert sum(data_process.BACKOFF * 2**n for n in range(data_process.DEATHS)) < client.PATIENCE
    assert 2 * max(producer.WAIT, server.BEAT) < client.SILENCE  # waiting is no silence
    assert 2 * server.BEAT < link.SILENCE < server.QUIET
