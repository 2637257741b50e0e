"""Other hosts that show whether the supervisor's own network works."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from srun_wrapper.detect import outage
from srun_wrapper.detect.outage import OutsideHosts, carriers, controllers, gateways


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "SlurmctldHost[0]": "head(10.0.0.1)",
                "SlurmctldHost[1]": "b",
                "SlurmctldPort": "6817",
            },
            [("10.0.0.1", 6817), ("b", 6817)],
        ),
        ({"SlurmctldHost[0]": "head", "SlurmctldPort": "6810-6817"}, [("head", 6810)]),
        ({"SlurmctldHost[0]": "head"}, []),
        ({}, []),
    ],
)
def test_slurmctlds_hosts(config: dict[str, str], expected: list[tuple[str, int]]) -> None:
    assert [host[1:] for host in controllers(config)] == expected


def test_default_gateways(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\n"
        "eth0\t00000000\t0100000A\t0003\n"
        "eth0\t0000000A\t00000000\t0001\n"
    )
    assert [host[1] for host in gateways(routes)] == ["10.0.0.1"]
    assert gateways(tmp_path / "none") == []


def test_interfaces_with_a_carrier(tmp_path: Path) -> None:
    for name, text in (("lo", "1"), ("eth0", "1\n"), ("eth1", "0\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "carrier").write_text(text)
    (tmp_path / "eth2" / "carrier").mkdir(parents=True)  # cannot be read: it is switched off
    assert carriers(tmp_path) == {"eth0"}


def test_hosts_that_have_answered_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that falls silent is named."""
    monkeypatch.setattr(outage, "gateways", list)
    monkeypatch.setattr(outage, "_others", lambda hosts: hosts)
    monkeypatch.setattr(outage, "carriers", set)

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            config = {"SlurmctldHost[0]": "127.0.0.1", "SlurmctldPort": str(port)}
            slurm: Any = SimpleNamespace(config=lambda: config, ping=lambda: False)
            outside = OutsideHosts()
            await outside.learn(slurm)
            assert len(outside.hosts) == 1
            before = time.monotonic()
            outside.ask(since=before)
            while outside.answered < before:
                await asyncio.sleep(0.01)
            assert await outside.missing(slurm) == ["slurmctld does not answer"]

            async def nothing(*_where: object) -> str:
                return "unreachable"

            monkeypatch.setattr(outage, "probe", nothing)
            assert await outside.missing(slurm) == ["slurmctld's host (127.0.0.1) is unreachable"]

    asyncio.run(asyncio.wait_for(scene(), 20.0))
