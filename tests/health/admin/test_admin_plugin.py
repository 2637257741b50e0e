"""The SPANK plugin: compiled and installed, the lines of the site's files, the doctor, the lua."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import installed_files
import pytest
from installed_files import carry_out, tree

from health.admin import cli, plugin
from health.admin.doctor.plugin_rules import of_plugin
from health.admin.install import InstallError, Present, WantedFile
from health.admin.node import AdminRequest, perform
from health.admin.plan import plan_install

request_for = installed_files.request_for
HEADERS = Path("/usr/include/slurm/spank.h").exists() and shutil.which("cc") is not None
needs_headers = pytest.mark.skipif(not HEADERS, reason="libslurm-dev and a C compiler are needed")
LUA = shutil.which("lua5.1") or shutil.which("lua")
needs_lua = pytest.mark.skipif(LUA is None, reason="a Lua interpreter (lua5.1) is needed")
MODULE = Path(plugin.__file__).resolve().parents[2] / "templates" / "robust.lua"
SITE = "local x = 1\nfunction slurm_cli_pre_submit(opts, offset)\n\treturn slurm.SUCCESS\nend\n"


def fake_object(release: str) -> str:
    return f"\0ELF robust-built-for:{release}:\0"


@needs_headers
def test_the_object_is_small_bound_to_its_release_and_needs_slurm_only() -> None:
    text = plugin.compiled()
    raw = text.encode("utf-8", "surrogateescape")
    assert raw.startswith(b"\x7fELF") and len(raw) < 40_000
    assert plugin.built_for(text) is not None
    # The text of a request over SSH is JSON.
    assert json.loads(json.dumps(text)) == text


def test_without_headers_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        "#!/bin/sh\necho 'x.c:9: fatal error: slurm/spank.h: No such file' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(InstallError, match=r"spank\.h: No such file; it needs Slurm's headers"):
        plugin.compiled()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(InstallError, match="no C compiler"):
        plugin.compiled()


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (fake_object("0x160508"), (22, 5)),
        (fake_object("0x180b05"), (24, 11)),
        (fake_object("0x1a0503"), (26, 5)),
        ("\0ELF", None),
    ],
)
def test_built_for(text: str, release: tuple[int, int] | None) -> None:
    assert plugin.built_for(text) == release


def test_a_binary_file_is_no_diff() -> None:
    file = WantedFile("/e/x.so", fake_object("0x160508"), 0o755)
    done = plan_install([file], [], {file.path: Present("none")}, {}, 0, "/e", {})
    assert done.changes[0].diff == f"binary file /e/x.so: nothing -> {len(file.text)} bytes\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", False),
        ("include /e/plugin/plugstack.conf\n", True),
        ("  include   /e/plugin/plugstack.conf # ours\n", True),
        ("#include /e/plugin/plugstack.conf\n", False),
        ("optional /e/plugin/spank_robust.so robust_srun=/x\n", True),
        ("required /e/plugin/spank_robust.so robust_srun=/x\n", False),
        ("include /e/plugin/plugstack.conf.d/*\n", False),
    ],
)
def test_includes(text: str, found: bool) -> None:
    assert plugin.includes(text, "/e") is found


def test_the_lines_of_the_site_are_diffs_and_nothing_is_written(tmp_path: Path) -> None:
    config = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "CliFilterPlugins": "syslog"}
    (tmp_path / "cli_filter.lua").write_text(SITE)
    (tmp_path / "plugstack.conf").write_text("optional /other.so\n")
    before = tree(tmp_path)
    lines = {Path(line.file).name: line.text for line in plugin.site_lines("/e", config)}
    assert tree(tmp_path) == before
    assert list(lines) == ["plugstack.conf", "slurm.conf", "cli_filter.lua"]
    assert lines["plugstack.conf"].splitlines()[-2:] == [
        " optional /other.so",
        "+include /e/plugin/plugstack.conf",
    ]
    assert lines["slurm.conf"] == "CliFilterPlugins=syslog,lua\n"
    assert not [line for line in lines["cli_filter.lua"].splitlines()[2:] if line[0] == "-"]
    assert "+\t\tlocal done, told = pcall(robust.cli_pre_submit, opts)" in lines["cli_filter.lua"]
    for name in ("plugstack.conf", "cli_filter.lua"):  # pasted, they are what is wanted
        text = (tmp_path / name).read_text()
        new = (
            plugin.with_call(name, text, "/e")
            if "lua" in name
            else f"{text}{plugin.include_line('/e')}\n"
        )
        (tmp_path / name).write_text(new)
    assert not plugin.site_lines("/e", config | {"CliFilterPlugins": "cli_filter/lua"})
    (tmp_path / "cli_filter.lua").unlink()
    submits = {
        "CliFilterPlugins": "lua",
        "JobSubmitPlugins": "lua",
        "SLURM_CONF": config["SLURM_CONF"],
    }
    names = [Path(line.file).name for line in plugin.site_lines("/e", submits)]
    assert names == ["cli_filter.lua", "job_submit.lua"]


def test_install_and_uninstall_touch_the_plugins_files_only(
    tmp_path: Path, request_for: AdminRequest
) -> None:
    carry_out(request_for)
    gate = tree(tmp_path)
    etc, top = request_for.etc, plugin.directory(request_for.etc)
    files = [
        WantedFile(f"{top}/{plugin.OBJECT}", fake_object("0x160508") + "\udcff", 0o755),
        WantedFile(f"{top}/{plugin.STACK}", "optional\n", 0o644),
    ]
    request = request_for._replace(etc=top, files=files, directories=plugin.directories(etc))
    done = carry_out(AdminRequest.from_json(request.as_json()))
    assert done.done and not done.error
    assert (Path(top) / plugin.OBJECT).read_bytes().endswith(b":\0\xff")
    assert not perform(request).changes
    gone = perform(AdminRequest("uninstall", top))
    paths = [Path(path).name for _, path, _ in gone.changes]
    assert paths[:2] == [plugin.STACK, plugin.OBJECT], "the list before what it names"
    assert not carry_out(AdminRequest("uninstall", top)).error
    assert tree(tmp_path) == gate


@pytest.mark.parametrize(
    ("release", "stack", "told"),
    [
        ("0x160508", True, []),
        ("0x180b05", True, ["is built for Slurm 24.11, and 22.05 runs: srun, sbatch and"]),
        ("0x160508", False, ["does not include the plugin: --robust is unknown"]),
        ("no", True, ["is no plugin of ours"]),
        ("", True, ["is missing, and "]),
        ("", False, []),
    ],
)
def test_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, stack: bool, told: list[str]
) -> None:
    monkeypatch.setattr("health.node.trust.hole", lambda _path: None)
    etc, slurm = str(tmp_path / "etc"), tmp_path / "slurm"
    top = Path(plugin.directory(etc))
    top.mkdir(parents=True)
    slurm.mkdir()
    (top / plugin.STACK).write_text("optional x robust_srun=/bin/sh\n")
    if release:
        (top / plugin.OBJECT).write_text(fake_object(release))
    if stack:
        (slurm / plugin.STACK).write_text(plugin.include_line(etc))
    (slurm / "cli_filter.lua").write_text(plugin.with_call("cli_filter.lua", "", etc))
    config = {
        "SLURM_CONF": str(slurm / "slurm.conf"),
        "CliFilterPlugins": "lua",
        "SLURM_VERSION": "22.05.8",
    }
    found = of_plugin(etc, config)
    bad = [remark for remark in found if remark.level != "ok"]
    assert len(bad) == len(told) and all(
        r.what.startswith(t) for r, t in zip(bad, told, strict=True)
    )
    assert bool(found) is bool(told or release)
    (top / plugin.STACK).write_text("optional x robust_srun=/gone\n")
    if release:
        record = {"v": 1, "files": {f"{top}/{plugin.OBJECT}": {"sha256": "0"}}, "dirs": []}
        (top / "manifest.json").write_text(json.dumps(record))
        assert any("was changed since it was installed" in r.what for r in of_plugin(etc, config))
    assert any("/gone cannot be run" in r.what for r in of_plugin(etc, config)) is bool(release)


def test_a_prefix_without_robust_srun(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="bin/robust-srun is missing"):
        plugin.files("/e", str(tmp_path))


def test_the_command_line_has_it() -> None:
    assert cli.main(["install", "--help"], io.StringIO()) == 0


# ---- the lua


def lua(program: str) -> str:
    assert LUA is not None
    head = f'local robust = dofile("{MODULE}")\n'
    done = subprocess.run(
        [LUA, "-"], input=head + program, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SET = 'spank={robust={robust="set"}}'
DONE = '["no-kill"]="set",requeue="set",["open-mode"]="a"'


@needs_lua
@pytest.mark.parametrize(
    ("options", "per", "told"),
    [
        ('type="sbatch"', 0, "nil"),
        ('type="sbatch",spank={other={}}', 0, "nil"),
        ('type="sbatch",spank={robust={robust="off"}}', 8, "nil"),
        ('type="sbatch",spank={robust={robust="observe"}}', 8, "nil"),
        (f'type="srun",{SET}', 8, "nil"),
        (f'type="salloc",{SET},["no-kill"]="unset",requeue="invalid-context"', 8, "--no-kill"),
        (f'type="sbatch",{SET}', 0, "--no-kill --requeue --open-mode=append"),
        (f'type="sbatch",{SET},["no-kill"]="set",requeue="requeue",["open-mode"]="a"', 0, "nil"),
        (f'type="sbatch",{SET},["no-kill"]="set",requeue="no-requeue",["open-mode"]="a"', 0, "nil"),
        (
            f'type="sbatch",{SET},["no-kill"]="set",requeue="set",["open-mode"]="append",nodes="4"',
            32,
            "--nodes=5 (1 spare)",
        ),
        (
            f'type="sbatch",{SET},{DONE},nodes="40-40"',
            32,
            "--nodes=42 (2 spare)",
        ),
        (f'type="sbatch",{SET},{DONE},nodes="2-4"', 2, "nil"),
        (f'type="sbatch",{SET},{DONE},nodes="1"', 2, "nil"),
        (
            f'type="sbatch",{SET},{DONE},nodes="4",export="NONE"',
            2,
            "nil",
        ),
        (
            f'type="sbatch",{SET},{DONE},nodes="4",ntasks="32"',
            2,
            "nil",
        ),
    ],
)
def test_cli_filter(options: str, per: int, told: str) -> None:
    program = f"robust.nodes_per_spare = {per}\nprint(robust.cli_pre_submit({{{options}}}))"
    want = told if told == "nil" else f"--robust: this job also gets {told}"
    assert lua(program) == want


@needs_lua
def test_spares_reach_robust_srun() -> None:
    program = (
        f'robust.nodes_per_spare = 2\nlocal o = {{type="sbatch",{SET},nodes="4"}}\n'
        'robust.cli_pre_submit(o)\nprint(o.nodes, o.export, o["no-kill"], o.requeue)'
    )
    assert lua(program).split() == ["6", "ALL,ROBUST_SPARES=2", "set", "set"]


@needs_lua
@pytest.mark.parametrize(
    ("job", "left"),
    [
        ("{}", "nil nil nil"),
        ('{spank_job_env={"_SLURM_SPANK_OPTION_robust_robust=off"}}', "nil nil nil"),
        ('{spank_job_env={[0]="_SLURM_SPANK_OPTION_robust_robust="}}', "full 1 robust=full"),
        (
            '{requeue=0,spank_job_env={"A=b","_SLURM_SPANK_OPTION_robust_robust=(null)"}}',
            "full 0 robust=full",
        ),
        (
            '{admin_comment="x",spank_job_env={"_SLURM_SPANK_OPTION_robust_robust=observe"}}',
            "observe nil x",
        ),
    ],
)
def test_job_submit(job: str, left: str) -> None:
    program = (
        f"local j = {job}\nlocal m = robust.job_submit(j)\nprint(m, j.requeue, j.admin_comment)"
    )
    assert lua(program).split() == left.split()


@needs_lua
@pytest.mark.parametrize("module", ["good", "missing", "error('x')", "return {}"])
@pytest.mark.parametrize("name", ["cli_filter.lua", "job_submit.lua"])
def test_a_broken_module_changes_no_job(tmp_path: Path, name: str, module: str) -> None:
    top = tmp_path / "plugin"
    top.mkdir()
    if module != "missing":
        (top / plugin.LUA).write_text(MODULE.read_text() if module == "good" else module)
    text = plugin.with_call(name, "", str(tmp_path))
    calls = "slurm_cli_pre_submit" if "cli" in name else "slurm_job_submit"
    head = "slurm = {SUCCESS = 0, log_info = function(f, s) print(string.format(f, s)) end}\n"
    out = lua(f'{head}{text}\nprint({calls}({{type="sbatch",{SET}}}, 0))')
    assert out.endswith("0")
    assert ("--no-kill" in out) is (module == "good" and "cli" in name)


@needs_lua
@pytest.mark.parametrize(
    ("job", "left"),
    [
        ('{script="x",environment={ROBUST_SPARES="1",SLURM_GET_USER_ENV="1"}}', "0"),
        ('{script="x",environment={SLURM_GET_USER_ENV="1"}}', "1"),  # --export=NONE
        ('{script="x",environment={ROBUST_SPARES="1"}}', "nil"),
        ('{environment={ROBUST_SPARES="1",SLURM_GET_USER_ENV="1"}}', "1"),  # no batch job
    ],
)
def test_the_count_of_spares_brings_no_login_environment(job: str, left: str) -> None:
    """26.05 holds a job whose user has none on the node."""
    program = (
        f"local j = {job}\nj.spank_job_env = {{'_SLURM_SPANK_OPTION_robust_robust=full'}}\n"
        "robust.job_submit(j)\nprint(j.environment.SLURM_GET_USER_ENV)"
    )
    assert lua(program).split() == [left]
