"""Refused installs: code and places of others, a manifest that is none, a dead stub."""

from __future__ import annotations

import json
import os
from pathlib import Path

import installed_files
import pytest
from installed_files import carry_out, tree

from health.admin import cli, node
from health.admin.install import Directory, InstallError, digest
from health.admin.node import AdminRequest, perform

request_for = installed_files.request_for


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: root")
def test_what_others_could_change_is_not_installed(
    tmp_path: Path, request_for: AdminRequest
) -> None:
    packages = tmp_path / "lib" / "health"
    packages.mkdir(parents=True)
    packages.chmod(0o755)
    module = packages / "gate.py"
    module.touch(mode=0o644)
    request = request_for._replace(dirs=[str(tmp_path / "lib")])
    assert not perform(request).error
    os.chown(module, 7, 7)
    error = perform(request).error
    assert error.startswith(
        f"{module} belongs to uid 7: a user who can write there gains root at the next job"
    )
    assert error.endswith(f"chown -h root:root {module} && chmod go-w {module}")
    os.chown(module, 0, 0)
    packages.chmod(0o777)
    assert f"{packages} can be written by others (mode 0777)" in perform(request).error
    packages.chmod(0o755)
    place = tmp_path / "users"
    place.mkdir()
    os.chown(place, 7, 7)
    error = perform(request._replace(directories=[Directory(f"{place}/a/etc", 0o755)])).error
    assert error.startswith(f"{place}/a/etc: {place} belongs to uid 7: root's files must lie")
    assert not (tmp_path / "etc").exists()


def test_a_manifest_that_others_could_write(tmp_path: Path, request_for: AdminRequest) -> None:
    carry_out(request_for)
    manifest = tmp_path / "etc" / "manifest.json"
    victim = tmp_path / "victim"
    victim.write_text("x\n")
    record = {"v": 1, "files": {str(victim): {"sha256": digest("x\n")}}, "dirs": []}
    manifest.write_text(json.dumps(record))
    manifest.chmod(0o666)
    assert "can be written by others" in perform(AdminRequest("uninstall", request_for.etc)).error
    assert victim.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"v": 2, "files": {}, "dirs": []}', '{"v": 1, "files": {"a": 1}}']
)
def test_a_manifest_that_is_none(tmp_path: Path, request_for: AdminRequest, text: str) -> None:
    carry_out(request_for)
    (tmp_path / "etc" / "manifest.json").write_text(text)
    assert "manifest.json" in perform(request_for).error


def test_stubs_that_would_not_start_are_not_installed(
    tmp_path: Path, request_for: AdminRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "MODULES", ("json", "no_such_package.cli"))
    reply = perform(request_for)
    assert "cannot import no_such_package.cli" in reply.error
    monkeypatch.setattr(node, "MODULES", ())
    assert (
        "/nowhere/python3: No such file"
        in perform(request_for._replace(python="/nowhere/python3")).error
    )
    assert "-IS failed" in perform(request_for._replace(python="/bin/false")).error
    assert not tree(tmp_path)


def test_without_nvml_it_is_said(
    request_for: AdminRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "NVML", "no_such_nvml")
    reply = perform(request_for)
    assert not reply.error and "no_such_nvml" in reply.notes[0]


def test_a_request_survives_its_journey(request_for: AdminRequest) -> None:
    back = AdminRequest.from_json(request_for.as_json())
    assert back.as_json() == request_for.as_json()
    assert perform(back).identity == perform(request_for).identity
    with pytest.raises(InstallError, match="another version"):
        AdminRequest.from_json(request_for.as_json().replace('"protocol": 1', '"protocol": 9'))


def test_a_settings_file_that_was_lost_is_not_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template's would end a dry run, on all nodes with --nodes."""
    (tmp_path / "robust.toml.last").write_text("[gate]\ndry_run = true\n")
    (tmp_path / "robust.toml.last").chmod(0o644)
    for more in ([], ["--nodes", "n1", "--ssh"]):
        assert cli.main(["install", "--etc", str(tmp_path), "--yes", "--tmpfiles", "", *more]) == 2
        assert f"{tmp_path}/robust.toml is missing, and robust.toml.last" in capsys.readouterr().err
    assert list(tree(tmp_path)) == ["robust.toml.last"]
