"""docs/timings.md has the limits as they are in the code, and those that hang together do."""

from __future__ import annotations

import importlib
import re
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
