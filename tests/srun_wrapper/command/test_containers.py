"""Mounts and words for robust-task in a container image, and for ranks that enter one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from robust_slurm import commands
from robust_slurm.config import flags
from srun_wrapper.command.containers import (
    ROOT,
    OwnPython,
    absolute_output,
    bound,
    carried,
    in_image,
    own_python,
)
from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.srun_options import SrunCommand, UsageError, split
from srun_wrapper.command.steps import Launch, standby_argv, step_argv, task_words
from srun_wrapper.protocol.task_options import OutputPlan, TaskOptions

LIB = "/usr/lib/x86_64-linux-gnu"
DEBIAN = OwnPython(
    executable="/usr/bin/python3.11",
    prefix="/shared/venv",
    base="/usr",
    stdlib="/usr/lib/python3.11",
    package="/shared/venv/lib/python3.11/site-packages",
    sites=("/shared/venv/lib/python3.11/site-packages",),
    libraries=(
        f"{LIB}/ld-linux-x86-64.so.2",
        f"{LIB}/libc.so.6",
        "/usr/lib/python3.11/lib-dynload/_ssl.so",
        "/shared/venv/lib/python3.11/site-packages/msgspec/_core.so",
    ),
)
CONDA = replace(
    DEBIAN,
    executable="/home/u/conda/bin/python3.11",
    prefix="/home/u/conda",
    base="/home/u/conda",
    stdlib="/home/u/conda/lib/python3.11",
    package="/home/u/conda/lib/python3.11/site-packages",
    sites=("/home/u/conda/lib/python3.11/site-packages",),
    libraries=("/home/u/conda/lib/libz.so.1", "/lib64/ld-2.28.so", "/lib64/libc-2.28.so"),
)


def command(*words: str) -> SrunCommand:
    return split([*words, "python", "train.py"], flags())


def mounts(found: SrunCommand) -> list[str]:
    option = found.get("container-mounts")
    return [] if option is None or option.value is None else option.value.split(",")


def test_a_python_of_the_distribution_brings_its_loader_and_its_c_library() -> None:
    found = carried(DEBIAN)
    assert found.mounts == ("/usr", "/shared/venv")
    assert found.words == (
        *(f"{ROOT}{LIB}/ld-linux-x86-64.so.2", "--inhibit-cache"),
        *("--library-path", f"{ROOT}{LIB}", f"{ROOT}/usr/bin/python3.11"),
        *("-S", "-X", f"{commands.SITES}={ROOT}{DEBIAN.sites[0]}"),
    )
    assert found.package == f"{ROOT}{DEBIAN.package}/robust_slurm"


def test_a_python_with_a_prefix_of_its_own_and_a_host_whose_lib_is_no_link() -> None:
    found = carried(CONDA)
    assert found.mounts == ("/lib64", "/home/u/conda")
    assert found.words[0] == f"{ROOT}/lib64/ld-2.28.so"
    assert found.words[3] == f"{ROOT}/home/u/conda/lib:{ROOT}/lib64"


def test_a_python_without_a_loader_is_started_as_it_is() -> None:
    found = carried(replace(CONDA, libraries=()))
    assert found.words[0] == f"{ROOT}/home/u/conda/bin/python3.11"


def test_this_python_is_found_with_all_that_it_imports() -> None:
    """Started by its loader, with no site of its own, it imports what robust-task does."""
    here = own_python()
    words = [word.replace(ROOT, "") for word in carried(here).words]
    code = "srun_wrapper.agent.task"
    done = subprocess.run(
        [*words, "-I", f"{here.package}/robust_slurm/commands.py", code],
        capture_output=True,
        text=True,
        env={},
        cwd="/",
        timeout=60,
    )
    assert done.returncode == 2 and "robust-task: started outside robust-srun" in done.stderr


def test_in_an_image_our_children_are_started_as_we_are() -> None:
    words = [word.replace(ROOT, "") for word in carried(own_python()).words]
    show = "import sys; sys.path.insert(0, sys.argv[1]); from robust_slurm import commands; "
    show += "print(*commands.own_python(), commands.own_program('py-spy'), sep='\\n')"
    package = own_python().package
    argv = [*words, "-I", "-c", show, package]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    *python, program = done.stdout.splitlines()
    assert python == words
    assert Path(program) == Path(sys.prefix).resolve() / "bin" / "py-spy"
    assert commands.own_python() == [sys.executable]


@pytest.mark.parametrize(
    ("words", "env", "users"),
    [
        (("--container-image=x.sqsh",), {}, []),
        (("--container-image", "x", "--container-mounts=/d:/d,/e"), {}, ["/d:/d", "/e"]),
        (("--container-name=x",), {"PYXIS_CONTAINER_MOUNTS": "/d:/d"}, ["/d:/d"]),
        ((), {"PYXIS_CONTAINER_IMAGE": "x"}, []),
        ((), {"SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image": "x"}, []),
        (
            ("--container-image=x", "--container-mounts=/a", "--container-mounts=/b"),
            {"PYXIS_CONTAINER_MOUNTS": "/not"},
            ["/b"],
        ),
    ],
)
def test_our_mounts_follow_the_users(
    words: tuple[str, ...], env: dict[str, str], users: list[str]
) -> None:
    """Pyxis gets one value of the option only, and then does not read its variable."""
    found, _, carry = in_image(command(*words), env, OutputPlan(), "")
    assert carry is not None
    assert mounts(found) == users + [f"{path}:{ROOT}{path}:ro" for path in carry.mounts]
    assert sum(option.name == "container-mounts" for option in found.srun) == 1


def test_without_an_image_nothing_changes() -> None:
    plain = command("-N2", "--container-mounts=/d")
    assert in_image(plain, {}, OutputPlan(out="o.%t"), "") == (plain, OutputPlan(out="o.%t"), None)


def test_the_job_step_and_standby_nodes_run_the_same_words() -> None:
    ours, _, carry = in_image(command("--container-image=x"), {}, OutputPlan(), "")
    launch = Launch(ours, StepPlan(), TaskOptions(), {}, carried=carry)
    assert carry is not None
    task = task_words(launch, "")
    assert task[: len(carry.words)] == list(carry.words)
    assert task[len(carry.words) :][:2] == ["-I", f"{carry.package}/commands.py"]
    argv = step_argv(launch, "")
    assert argv[-len(task) :] == task
    job = type("J", (), {"id": 7, "tres_per_node": "", "account": "", "qos": ""})()
    job.cpus_per_task = 1
    standby = standby_argv(launch, job, "standby", 1, (), 10)
    assert [word for word in standby if word.startswith("--container-")] == [
        word for word in argv if word.startswith("--container-")
    ]


def test_a_python_of_the_image_needs_no_mounts() -> None:
    plain = command("--container-image=x")
    assert in_image(plain, {}, OutputPlan(), "/opt/py/bin/python") == (plain, OutputPlan(), None)


def test_an_oci_bundle_needs_a_python_of_its_own() -> None:
    for words, env in ((("--container=/b",), {}), ((), {"SLURM_CONTAINER": "/b"})):
        with pytest.raises(UsageError, match="set task_python"):
            in_image(command(*words), env, OutputPlan(), "")
        assert in_image(command(*words), env, OutputPlan(), "python3")[2] is None


def test_files_of_the_ranks_are_where_srun_would_have_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = OutputPlan(out="logs/%j/o.%t", err="/s/e.%t")
    assert absolute_output(plan, command("-D", "/w")).out == "/w/logs/%j/o.%t"
    found, output, _ = in_image(command("--container-image=x"), {}, plan, "python3")
    assert (output.out, output.err) == (f"{tmp_path}/logs/%j/o.%t", "/s/e.%t")
    assert mounts(found) == ["/s:/s", f"{tmp_path}/logs:{tmp_path}/logs"]


@pytest.mark.parametrize(
    ("env", "apptainer", "singularity"),
    [
        ({}, "", ""),
        ({"APPTAINER_BINDPATH": "/d"}, "/d,", "/d,"),
        ({"SINGULARITY_BINDPATH": "/d"}, "/d,", "/d,"),
        ({"APPTAINER_BINDPATH": "/d", "SINGULARITY_BINDPATH": "/e"}, "/d,", "/e,"),
    ],
)
def test_apptainer_shows_the_package_beside_what_the_user_binds(
    env: dict[str, str], apptainer: str, singularity: str
) -> None:
    """Apptainer warns, and drops one, where its own variable and Singularity's are not equal."""
    mount = "/v/robust_slurm:/v/robust_slurm:ro"
    assert bound(env | {"HOME": "/h"}, "/v/robust_slurm") == {
        "APPTAINER_BINDPATH": f"{apptainer}{mount}",
        "SINGULARITY_BINDPATH": f"{singularity}{mount}",
    }


def test_a_path_that_apptainer_cannot_be_told_is_left_out() -> None:
    assert bound({}, "/a:b/robust_slurm") == {} == bound({}, "/a,b/robust_slurm")


def test_sites_named_by_the_users_pythonpath_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "/theirs/site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, theirs])
    assert theirs in own_python().sites
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/x", theirs]))
    assert theirs not in own_python().sites


def test_sites_of_ours_stay_ours_where_pythonpath_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user who exports the environment's own site-packages does not take it from robust-task."""
    ours = own_python().sites
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert ours and own_python().sites == ours
