"""An install below a test's own directory: the request, carried out, and what is there then."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from health.admin import node
from health.admin.install import Directory, WantedFile
from health.admin.node import AdminReply, AdminRequest, perform
from health.settings_file import END


@pytest.fixture
def request_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdminRequest:
    """Stub, settings and spool below tmp_path; the modules that are proved exist."""
    monkeypatch.setattr(node, "MODULES", ("json",))
    monkeypatch.setattr(node, "NVML", "ast")
    etc = tmp_path / "etc"
    return AdminRequest(
        "install",
        str(etc),
        "",
        [
            WantedFile(f"{etc}/prolog", "#!/bin/sh\n", 0o755),
            WantedFile(f"{etc}/robust.toml", f"# a = 1\n{END}\n", 0o644, settings=True),
        ],
        [Directory(str(etc), 0o755), Directory(f"{tmp_path}/spool", 0o755)],
        "/usr/bin/python3",
        (),
    )


def newer(request: AdminRequest) -> AdminRequest:
    """The next release: another prolog, other settings offered, one more file."""
    etc = request.etc
    return request._replace(
        files=[
            WantedFile(f"{etc}/prolog", "#!/bin/sh\n# new\n", 0o755),
            WantedFile(f"{etc}/robust.toml", f"# a = 2\n{END}\n", 0o644, settings=True),
            WantedFile(f"{etc}/epilog", "#!/bin/sh\n", 0o755),
        ]
    )


def carry_out(request: AdminRequest) -> AdminReply:
    looked = perform(request)
    assert not looked.error
    return perform(request._replace(expect=looked.identity))


def tree(top: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(top)): (
            stat.S_IMODE(path.stat().st_mode),
            path.read_text() if path.is_file() else "",
        )
        for path in sorted(top.rglob("*"))
    }
