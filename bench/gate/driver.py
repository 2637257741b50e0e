"""The part of bench.gate that runs on the node, as root: prints its samples as one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEADLINE = 60.0
# NHC's plain checks of what our host families look at too; no GPU among them.
NHC_CONF = (
    "check_fs_mount_rw -f /",
    "check_fs_mount_rw -f /tmp",
    "check_fs_free / 3%",
    "check_fs_free /tmp 3%",
    "check_fs_ifree / 3%",
    "check_fs_used /dev/shm 95%",
    "check_hw_mem 1kb 100TB",
    "check_hw_physmem 1k 100TB",
    "check_hw_mem_free 1mb",
    "check_hw_swap 0 100TB",
    "check_hw_eth eth0",
    "check_ps_loadavg 1000",
    "check_ps_service -u root slurmd",
    "check_file_test -r -w -x -d /tmp /var/tmp",
)
# A virtual machine's clock is often set by its host: known there, and no trouble of the node.
_TOML = """[gate]
spool = "{}/spool"
disabled = ["clock-unsynchronised"]
# end of robust.toml
"""


def main() -> None:
    what, runs = sys.argv[1], int(sys.argv[2])
    print(json.dumps(_totals(runs) if what == "total" else _checks(runs)))


def _environ() -> dict[str, str]:
    """Return the environment that slurmd gives a prolog (22.05): no PATH."""
    return {
        "SLURMD_NODENAME": "n1",
        "SLURM_CONF": os.environ["SLURM_CONF"],
        "SLURM_CLUSTER_NAME": "bench",
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_JOB_UID": "20001",
        "SLURM_JOB_USER": "trainer",
        "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7",
        "SLURM_JOB_PARTITION": "train",
        "SLURM_NODELIST": "n1",
        "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
    }


def _stub(directory: Path) -> Path:
    """The prolog as `robust-admin install` writes it."""
    from bench.own_prefix import own_prefix
    from health.admin.render import Site, node_files

    site = Site(own_prefix(), str(directory), "", str(directory / "spool"))
    files = {Path(wanted.path).name: wanted for wanted in node_files(site, "")}
    (directory / "robust.toml").write_text(_TOML.format(directory))
    path = directory / "prolog"
    path.write_text(files["prolog"].text)
    path.chmod(0o755)
    return path


def _totals(runs: int) -> dict[str, Any]:
    from health.checks import ALL

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        python = os.path.realpath(sys.executable)
        commands: dict[str, tuple[list[str], dict[str, str]]] = {
            "robust": ([str(_stub(directory))], _environ()),
            "interpreter": ([python, "-I", "-S", "-c", "pass"], {}),
        }
        if "BENCH_NHC" in os.environ:
            commands["nhc"] = _nhc(Path(os.environ["BENCH_NHC"]), directory)
        if "BENCH_GCM" in os.environ:
            check = ["check-storage", "disk-usage", "bench", "prolog", "--volume", "/"]
            check += ["--usage-critical-threshold", "100", "--usage-warning-threshold", "100"]
            argv = [os.environ["BENCH_GCM"], *check, "--sink", "do_nothing"]
            argv += ["--log-folder", str(directory)]
            commands["gcm"] = (argv, {"PATH": os.defpath, "HOME": str(directory)})
        samples: dict[str, list[float]] = {key: [] for key in commands}
        for run in range(runs + 1):  # the first one warms the page cache for all alike
            for key, (argv, env) in commands.items():
                seconds = _timed(argv, env)
                if run:
                    samples[key].append(seconds)
        told = directory / "spool" / "history.jsonl"
        if told.exists() and (ill := [e for e in told.read_text().splitlines() if _is_ill(e)]):
            sys.exit(f"the node is not healthy: {ill[0][:1500]}")
    conditions = sum(len(check.conditions) for check in ALL)
    return {**samples, "conditions": conditions, "families": len(ALL)}


def _is_ill(event: str) -> bool:
    """Return whether a run found more than what users do there, such as a high load."""
    found = json.loads(event).get("data", {}).get("findings", [])
    return any(finding.get("class") != "user" for finding in found)


def _timed(argv: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        argv, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE
    )
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        text = (done.stdout + done.stderr).decode(errors="replace")
        sys.exit(f"{argv[0]}: exit code {done.returncode}: {text[-1500:]}")
    return seconds


def _nhc(checkout: Path, directory: Path) -> tuple[list[str], dict[str, str]]:
    conf = directory / "nhc.conf"
    conf.write_text("".join(f"* || {line}\n" for line in NHC_CONF))
    argv = ["/bin/bash", str(checkout / "nhc"), f"INCDIR={checkout}/scripts"]
    argv += [f"HELPERDIR={checkout}/helpers", f"CONFFILE={conf}", "MARK_OFFLINE=0"]
    return [*argv, f"LOGFILE={directory}/nhc.log"], {"PATH": os.environ["PATH"]}


def _checks(runs: int) -> dict[str, Any]:
    families: dict[str, list[float]] = {}
    total: list[float] = []
    argv = [sys.executable, "-m", "health.cli", "check", "--where", "prolog", "--json"]
    env = {**os.environ, **_environ()}
    for _ in range(runs):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE)
        if done.returncode != 0:
            sys.exit(f"robust-health check: exit code {done.returncode}: {done.stdout[-1500:]}")
        report = json.loads(done.stdout)
        total.append(float(report["total_ms"]))
        for ran in report["ran"]:
            families.setdefault(str(ran["family"]), []).append(float(ran["ms"]))
    return {"families": families, "all": total}


if __name__ == "__main__":
    main()
