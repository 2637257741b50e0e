"""torchrun's own parser is the judge of what robust-task makes of its command line."""

from __future__ import annotations

from argparse import Namespace

import pytest

from srun_wrapper.command.torchrun import _FLAGS, _VALUED, restarts_itself, torchrun_overrides

torch_run = pytest.importorskip("torch.distributed.run")
torch_launch = pytest.importorskip("torch.distributed.launch")


def _run(
    line: str, *, first: bool, nodes: int = 4, env: dict[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    command, extra = torchrun_overrides(line.split(), nodes, 2, "10.0.0.7", 4242, first, env)
    return " ".join(command), extra


def _seen(monkeypatch: pytest.MonkeyPatch, line: str, **kwargs: object) -> Namespace:
    """Parse the result with torchrun itself."""
    command, extra = _run(line, **kwargs)  # type: ignore[arg-type]
    for name, value in extra.items():
        monkeypatch.setenv(name, value)
    parsed: Namespace = torch_run.parse_args(command.split()[1:])
    return parsed


def test_the_option_table_is_torchruns() -> None:
    parser = torch_run.get_args_parser()
    flags: set[str] = set()
    valued: set[str] = set()
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                (flags if action.nargs == 0 else valued).add(option[2:].replace("_", "-"))
    assert flags <= _FLAGS and _FLAGS - flags == {"use-env"}  # use-env is torch.distributed.launch
    assert valued == _VALUED


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --master_addr x",
        "python -c import -m torch.distributed.run",
        "python -m other -m torch.distributed.run",
        "bash -c torchrun",
        "mytorchrun x",
        "python",
        "python -m",
        "torchrun --standalone --nproc_per_node 2 train.py",
    ],
)
def test_other_commands_are_untouched(line: str) -> None:
    for first in (True, False):
        assert _run(line, first=first) == (line, {})


@pytest.mark.parametrize(
    "head",
    [
        "torchrun",
        "/opt/env/bin/torchrun",
        "python -m torch.distributed.run",
        "/usr/bin/python3.11 -u -X faulthandler -Wignore -m torch.distributed.run",
        "python3 -um torch.distributed.launch",
        "python -Im torch.distributed.run",
        "python /opt/env/bin/torchrun",
    ],
)
def test_missing_options_are_filled(head: str) -> None:
    line = f"{head} --nproc-per-node 8 train.py --master_addr mine"
    expected = {
        "PET_NNODES": "4",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "10.0.0.7",
        "PET_MASTER_PORT": "4242",
    }
    assert _run(line, first=True) == (line, expected)
    assert _run(line, first=False) == (line, expected)


def test_torchrun_reads_what_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen(monkeypatch, "torchrun --nproc-per-node=8 train.py", first=True)
    assert (seen.nnodes, seen.node_rank, seen.master_addr, seen.master_port) == (
        *("4", 2),
        *("10.0.0.7", 4242),
    )
    assert torch_run.get_rdzv_endpoint(seen) == "10.0.0.7:4242"


STATIC = "torchrun --nnodes 4 --node_rank 2 --master_addr=n1 --master-port 29500 train.py"
C10D = "torchrun --rdzv-backend=c10d --rdzv_endpoint n1:29500 --rdzv-id=77 train.py --rdzv-id=z"


@pytest.mark.parametrize(
    ("line", "later"),
    [
        (STATIC, STATIC.replace("n1", "10.0.0.7").replace("29500", "4242")),
        (C10D, C10D.replace("n1:29500", "10.0.0.7:4242").replace("-id=77", "-id=77-p4242")),
        (  # the endpoint wins over the master address, also with static
            "torchrun --rdzv-endpoint=n1:1 train.py",
            "torchrun --rdzv-endpoint=10.0.0.7:4242 train.py",
        ),
        (
            "torchrun --master_p 1 --rdzv-end n1:1 -r 3 -t3 -m train.py",
            "torchrun --master_p 4242 --rdzv-end 10.0.0.7:4242 -r 3 -t3 -m train.py",
        ),
        (  # a service outside the job
            "torchrun --rdzv-backend=etcd-v2 --rdzv-endpoint=etcd:2379 --rdzv-id=a train.py",
            "torchrun --rdzv-backend=etcd-v2 --rdzv-endpoint=etcd:2379 --rdzv-id=a-p4242 train.py",
        ),
    ],
)
def test_given_addresses_follow_the_epoch(line: str, later: str) -> None:
    assert _run(line, first=True)[0] == line
    assert _run(line, first=False)[0] == later


@pytest.mark.parametrize("host", ["localhost:0", "127.0.0.1:29500", "[::1]:29500", "localhost"])
def test_loopback_stays(host: str) -> None:
    line = f"torchrun --rdzv-backend=c10d --rdzv-endpoint={host} train.py"
    assert _run(line, first=False, nodes=1) == (
        line,
        {"PET_NNODES": "1", "PET_RDZV_ID": "none-p4242"},
    )
    line = "torchrun --master-addr=127.0.0.1 --master-port=29500 train.py"
    assert _run(line, first=False, nodes=1)[0] == line


def test_one_node_lets_torchrun_choose_its_port() -> None:
    env = {"PET_NNODES": "1", "PET_NODE_RANK": "2"}
    assert _run("torchrun train.py", first=False, nodes=1) == ("torchrun train.py", env)


def test_c10d_without_endpoint_gets_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "torchrun --rdzv-backend c10d train.py"
    assert _run(line, first=True)[1] == {"PET_NNODES": "4", "PET_RDZV_ENDPOINT": "10.0.0.7:4242"}
    seen = _seen(monkeypatch, line, first=False)
    assert (seen.rdzv_endpoint, seen.rdzv_id) == ("10.0.0.7:4242", "none-p4242")


def test_the_users_own_variables_count() -> None:
    env = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "n1:1", "PET_RDZV_ID": "x"}
    assert _run("torchrun train.py", first=True, env=env)[1] == {"PET_NNODES": "4"}
    assert _run("torchrun train.py", first=False, env=env)[1] == {
        "PET_NNODES": "4",
        "PET_RDZV_ENDPOINT": "10.0.0.7:4242",
        "PET_RDZV_ID": "x-p4242",
    }


def test_ipv6_master_is_bracketed(monkeypatch: pytest.MonkeyPatch) -> None:
    command, env = torchrun_overrides(["torchrun", "t.py"], 2, 0, "fe80::1", 4242, True)
    assert env["PET_MASTER_ADDR"] == "[fe80::1]"
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert torch_run.get_rdzv_endpoint(torch_run.parse_args(command[1:])) == "[fe80::1]:4242"


@pytest.mark.parametrize(
    ("line", "env", "becomes", "extra"),
    [
        ("--max-restarts=3 train.py", {}, "--max-restarts=0 train.py", {}),
        ("--max_restarts 3 train.py", {}, "--max_restarts 0 train.py", {}),
        ("--standalone --max-r=3 train.py", {}, "--standalone --max-r=0 train.py", {}),
        ("train.py --max-restarts=3", {}, "train.py --max-restarts=3", {}),
        ("--max-restarts=0 train.py", {}, "--max-restarts=0 train.py", {}),
        ("--max-restarts=x train.py", {}, "--max-restarts=x train.py", {}),  # torchrun says it
        (
            "train.py",
            {"PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1"},
            "train.py",
            {"PET_MAX_RESTARTS": "0"},
        ),
        ("train.py", {"PET_MAX_RESTARTS": "2"}, "train.py", {"PET_MAX_RESTARTS": "0"}),
    ],
)
def test_torchrun_starts_no_ranks_again_by_itself(
    line: str, env: dict[str, str], becomes: str, extra: dict[str, str]
) -> None:
    command = f"torchrun {line}"
    for first in (True, False):
        done, added = _run(command, first=first, nodes=1, env=env)
        assert done == f"torchrun {becomes}"
        assert {k: v for k, v in added.items() if k == "PET_MAX_RESTARTS"} == extra
        assert bool(restarts_itself(command.split(), env)) == (done != command or bool(extra))
        assert restarts_itself(done.split(), env | added) == 0
