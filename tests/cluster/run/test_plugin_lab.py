"""The SPANK plugin on a real Slurm, in jobs with and without --robust, intact and broken.

robust-admin installs it on a site that has lua files of its own, and uninstalls it at the end.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from admin_prefix import make_prefix
from jobs import TOY, Training, prepared

from bench.releases.plugin import headers
from health.admin import plugin
from lab import Cluster

HEADERS = Path("/usr/include/slurm/spank.h").exists() and shutil.which("cc") is not None
WHY = "Slurm's headers (libslurm-dev) and a C compiler are needed to build the plugin"
pytestmark = pytest.mark.skipif(not HEADERS, reason=WHY)


ADMIN = str(Path(sys.prefix) / "bin" / "robust-admin")
# The site's own files: each leaves its mark on every job.
OWN = {
    "cli_filter.lua": """\
function slurm_cli_setup_defaults(options, early)
	return slurm.SUCCESS
end

function slurm_cli_pre_submit(opts, pack)
	opts["comment"] = "filter"
	return slurm.SUCCESS
end

function slurm_cli_post_submit(pack, job_id, step_id)
	return slurm.SUCCESS
end
""",
    "job_submit.lua": """\
function slurm_job_submit(job, parts, uid)
	job.comment = (job.comment or "") .. "+submit"
	return slurm.SUCCESS
end

function slurm_job_modify(job, rec, parts, uid)
	return slurm.SUCCESS
end
""",
}
MARK = "filter+submit"
SPARES = """\
if has_robust then
	robust.nodes_per_spare = 2
end
"""


def patched(text: str, diff: str) -> str:
    """Apply a unified diff that only adds lines, as ``patch`` does."""
    old, new = text.splitlines(), list[str]()
    at = 0
    for line in diff.splitlines()[2:]:
        found = re.match(r"@@ -(\d+)(,0)?", line)
        if found is not None:
            begin = int(found[1]) - (0 if found[2] else 1)
            new += old[at:begin]
            at = begin
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert line == f" {old[at]}", diff
            new.append(old[at])
            at += 1
    return "\n".join([*new, *old[at:], ""])


class Site:
    """A lab with lua files of its own, and robust-admin's plugin, by the lines that it prints."""

    def __init__(self, lab: Cluster) -> None:
        self.lab = lab
        self.slurm = lab.spec.dir / "etc"
        etc = str(lab.spec.dir / "robust")
        self.top = Path(plugin.directory(etc))
        for name, text in OWN.items():
            (self.slurm / name).write_text(text)
        self.reconfigure("JobSubmitPlugins=lua\n")
        where = ["--slurm-include", headers(lab)] if headers(lab) else []
        # Root takes no prefix with an editable install; its robust-srun runs as the user.
        prefix = make_prefix(lab.spec.dir / "prefix")
        shutil.copy(Path(sys.prefix) / "bin" / "robust-srun", prefix / "bin")
        self.admin = [ADMIN, "{}", "--plugin", "--etc", etc, "--yes", "--json"]
        where += ["--prefix", str(prefix)]
        found = self.change("install", *where)
        assert (found["machines"][0]["result"], found["machines"][0]["error"]) == ("done", "")
        assert {name: (self.slurm / name).read_text() for name in OWN} == OWN, "it only prints"
        lines = dict(line.split(":  ", 1) for line in found["slurm_needs"])
        conf = lines.pop("slurm.conf")
        assert conf == "CliFilterPlugins=lua\n"
        assert [Path(file).name for file in lines] == [plugin.STACK, *OWN]
        for file, diff in lines.items():
            path = Path(file)
            path.write_text(patched(path.read_text() if path.exists() else "", diff))
        self.reconfigure(conf)
        assert not self.change("install", *where)["slurm_needs"]

    @property
    def object(self) -> Path:
        return self.top / plugin.OBJECT

    def change(self, verb: str, *words: str) -> dict[str, Any]:
        """Run robust-admin as root on the login node."""
        argv = [word.format(verb) for word in self.admin]
        done = self.lab.exec("head", [*argv, *words], user=False, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def reconfigure(self, line: str) -> None:
        """Add a line to slurm.conf."""
        conf = self.slurm / "slurm.conf"
        conf.write_text(f"{conf.read_text()}{line}")
        self.lab.exec("head", ["scontrol", "reconfigure"], user=False, check=True)

    def submit(self, training: Training, body: Sequence[str], sbatch: Sequence[str]) -> str:
        """Submit these lines; returns what sbatch printed to stderr."""
        lines = [f"export {name}={value}" for name, value in training.exports().items()]
        step = "SLURM_STEP_ID=3"  # as in the shell of a step
        head = [
            "env",
            step,
            "sbatch",
            "--parsable",
            "-D",
            str(training.dir),
            "-o",
            str(training.dir / "out"),
        ]
        done = self.run([*head, *sbatch], "\n".join(["#!/bin/bash", *lines, *body, ""]))
        assert done.returncode == 0, done.stderr
        training.job = int(done.stdout)
        return done.stderr

    def run(self, argv: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
        return self.lab.exec("head", list(argv), input=text, timeout=60)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster(nodes=3, standby=1) as lab:
        yield Site(lab)


def test_a_plain_job_is_untouched_also_by_a_broken_plugin(site: Site) -> None:
    """The same words, environment, signals, output and exit code, whatever is installed."""
    names = "env | sed 's/=.*//' | sort"
    show = f"grep -E 'SigBlk|SigIgn' /proc/self/status; {names}; exit 3"
    body = [f'srun -N1 -n1 bash -c "{show}"', "echo code $?"]
    intact = site.object.read_bytes()
    found = re.search(rb"robust-built-for:0x([0-9a-f]+):", intact)
    assert found is not None
    number = int(found[1], 16).to_bytes(4, "little")
    older = intact.replace(number, bytes([number[0], number[1], 15, 0]))
    outputs = []
    for content in (intact, older, None):
        site.object.unlink()  # a slurmstepd may have it mapped still
        if content is not None:
            site.object.write_bytes(content)
        done = site.run(["salloc", "-Q", "-N1", "bash", "-c", "; ".join(body)])
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    site.object.write_bytes(intact)
    assert outputs[0].endswith("code 3\n") and "ROBUST" not in outputs[0]
    assert len(set(outputs)) == 1, outputs


def test_a_script_with_plain_srun_survives_a_lost_node(site: Site) -> None:
    training = prepared(site.lab, 2, 20)
    line = training.line([], ["--hold", "8"]).replace("robust-srun", "srun")
    told = site.submit(training, ["srun -N1 -n1 hostname", line], ["--robust", "-N2"])
    assert "this job also gets --no-kill --requeue --open-mode=append" in told
    training.wait_step(8)
    site.lab.crash(training.nodes().replace("[1-2]", "2"))
    training.check_done()
    assert training.says("this line runs as plain srun: it uses 1 of the job's 2 nodes")
    training.only_incident(symptom="node_lost", action="swap_standby", outcome="recovered")
    site.lab.heal("n2")


def test_observe_and_off(site: Site) -> None:
    """Observe mode reports what it would do, and the step is as srun's own."""
    training = prepared(site.lab, 2, 12)
    script = training.dir / "rank.sh"
    toy = f"python {TOY} --dir {training.dir} --steps 12 --fault exit --at 6"
    own = "RANK=$SLURM_PROCID WORLD_SIZE=2 MASTER_ADDR=$(hostname) MASTER_PORT=45000"
    script.write_text(f"#!/bin/bash\n[ $SLURM_PROCID = 0 ] || sleep 0.1\n{own} exec {toy}\n")
    script.write_text(script.read_text().replace("$(hostname)", "$SLURM_LAUNCH_NODE_IPADDR"))
    script.chmod(0o755)
    body = [f"srun {script}", "echo observed $?", f"srun --robust=off {script}", "echo plain $?"]
    sizes = ["-N2", "-w", "n1,n3", "--ntasks-per-node=1"]
    site.submit(training, body, ["--robust=observe", *sizes])
    assert training.wait_end() == 0, training.story()
    assert training.says("^observed 3$") and training.says("^plain 0$"), training.story()
    [record] = training.incidents()
    assert record["outcome"] == "observed: would restart all ranks in place"
    assert not training.accusations() and len(training.events("epoch")) == 1
    assert training.says("would restart all ranks in place .*nothing was done")


def test_salloc_from_a_login_shell_and_a_prefix_that_is_gone(site: Site) -> None:
    own = "PYTHONHOME=/nowhere SLURM_MPI_TYPE=none"
    state = f"export ROBUST_STATE_DIR={site.lab.shared}/state ROBUST_WARM=0 {own}"
    lines = [
        state,
        "srun --rob bash -c 'echo rank $RANK; exit 4'",
        "echo code $?",
        "srun --pty true",
    ]
    argv = ["env", "SLURM_STEP_ID=0", "salloc", "-Q", "--robust", "-N1", "bash", "-c"]
    argv.append("; ".join(lines))
    done = site.run(argv)
    assert done.stdout == "rank 0\ncode 4\n", "once, and with its exit code"
    assert "failed before its first step" in done.stderr
    stack = site.top / plugin.STACK
    kept = stack.read_text()
    try:
        stack.write_text(kept.replace("robust-srun", "gone"))
        done = site.run(["salloc", "-Q", "--robust", "-N1", "srun", "bash", "-c", "echo $RANK-"])
    finally:
        stack.write_text(kept)
    assert done.stdout == "-\n" and done.returncode == 0
    assert "No such file or directory; plain srun goes on" in done.stderr
    assert site.run(["sbatch", "--robust=all", "--wrap=true"]).returncode != 0


def test_the_sites_lua_runs_on_and_jobs_get_spares(site: Site) -> None:
    """Both lua files meet Slurm's own plugins: each job has their marks, a robust one ours too."""
    lua = site.slurm / "cli_filter.lua"
    kept = lua.read_text()
    load, rest = kept.split("\n", 1)
    lua.write_text(f"{load}\n{SPARES}{rest}")
    try:
        training = prepared(site.lab, 2, 3)
        line = training.line([], []).replace("robust-srun", "srun")
        told = site.submit(training, [line], ["--robust", "-N2", "--ntasks-per-node=1"])
        assert "--nodes=3 (1 spare)" in told
        training.check_done()
        job = site.lab.job(training.job)
        assert (job["NumNodes"], job["Requeue"], job["Comment"]) == ("3", "1", MARK)
        assert job["AdminComment"] == "robust=full"
        roles = [node["role"] for node in training.rosters()[-1]["nodes"]]
        assert sorted(roles) == ["active", "active", "spare"]
        plain = prepared(site.lab, 1, 1)
        assert site.submit(plain, ["true"], ["-N2", "--no-requeue"]) == ""
        job = site.lab.job(plain.job)
        assert (job["NumNodes"][0], job["Requeue"], job["Comment"]) == ("2", "0", MARK)
        assert "AdminComment" not in job
    finally:
        lua.write_text(kept)


def test_uninstalled_it_leaves_the_sites_files_and_jobs_as_they_are(site: Site) -> None:
    """A file that calls what is gone, and sets the job's number of spares, stays as well."""
    lua = site.slurm / "cli_filter.lua"
    lua.write_text(lua.read_text().replace("\n", f"\n{SPARES}", 1))
    texts = [(site.slurm / name).read_text() for name in (*OWN, plugin.STACK)]
    found = site.change("uninstall")
    assert found["machines"][0]["result"] == "done" and not site.top.exists()
    assert [(site.slurm / name).read_text() for name in (*OWN, plugin.STACK)] == texts
    plain = prepared(site.lab, 1, 1)
    assert site.submit(plain, ["srun -N1 -n1 true && echo ran"], ["-N2"]) == ""
    assert site.lab.job(plain.job)["Comment"] == MARK
    assert plain.wait_end() == 0 and plain.says("^ran$"), plain.story()
    assert site.run(["sbatch", "--robust", "--wrap=true"]).returncode != 0
