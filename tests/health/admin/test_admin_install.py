"""Install and uninstall on a real directory: what is there, what stays, what stops it."""

from __future__ import annotations

import threading
from pathlib import Path

import installed_files
from installed_files import carry_out, newer, tree

from health.admin.node import AdminReply, AdminRequest, perform
from health.settings_file import END

request_for = installed_files.request_for


def test_install_twice_and_uninstall(tmp_path: Path, request_for: AdminRequest) -> None:
    assert not tree(tmp_path)
    done = carry_out(request_for)
    assert done.done and not done.error
    found = tree(tmp_path)
    names = ["manifest.json", "prolog", "robust.toml", "robust.toml.last"]
    assert list(found) == ["etc", *(f"etc/{name}" for name in names), "spool"]
    assert found["etc/robust.toml.last"] == found["etc/robust.toml"] == (0o644, f"# a = 1\n{END}\n")
    assert found["etc/prolog"] == (0o755, "#!/bin/sh\n")
    assert found["spool"][0] == 0o755
    again = perform(request_for)
    assert not again.changes and not again.notes
    gone = carry_out(AdminRequest("uninstall", request_for.etc))
    assert not gone.error and not gone.notes
    assert not tree(tmp_path)
    nothing = perform(AdminRequest("uninstall", request_for.etc))
    assert not nothing.changes and "nothing is installed" in nothing.notes[0]


def test_the_copy_of_the_settings_is_of_the_last_good_ones(
    tmp_path: Path, request_for: AdminRequest
) -> None:
    (tmp_path / "etc").mkdir(mode=0o755)
    toml, last = (tmp_path / "etc" / name for name in ("robust.toml", "robust.toml.last"))
    good = f"[gate]\ndry_run = true\n{END}\n"
    toml.write_text(good)
    toml.chmod(0o644)
    carry_out(request_for)
    assert last.read_text() == toml.read_text(), "what its admin wrote, not what is offered"
    toml.write_text("[gate\n")
    assert not carry_out(newer(request_for)).error
    assert last.read_text() == good
    gone = perform(AdminRequest("uninstall", request_for.etc))
    assert ("remove", str(last)) in [(action, path) for action, path, _ in gone.changes]
    assert not carry_out(AdminRequest("uninstall", request_for.etc)).error
    assert list(tree(tmp_path)) == ["etc", "etc/robust.toml"]


def test_looking_changes_nothing(tmp_path: Path, request_for: AdminRequest) -> None:
    assert perform(request_for).changes
    assert not tree(tmp_path)


def test_uninstall_leaves_what_was_edited(tmp_path: Path, request_for: AdminRequest) -> None:
    carry_out(request_for)
    (tmp_path / "etc" / "robust.toml").write_text("a = 2\n")
    (tmp_path / "spool" / "history.jsonl").write_text("{}\n")
    gone = carry_out(AdminRequest("uninstall", request_for.etc))
    assert list(tree(tmp_path)) == ["etc", "etc/robust.toml", "spool", "spool/history.jsonl"]
    assert len([note for note in gone.notes if note.startswith("left: ")]) == 3
    again = carry_out(request_for)
    assert not again.error
    assert (tmp_path / "etc" / "robust.toml").read_text() == "a = 2\n"
    assert (tmp_path / "etc" / "robust.toml.new").read_text() == f"# a = 1\n{END}\n"


def test_a_change_since_it_was_shown_stops_it(tmp_path: Path, request_for: AdminRequest) -> None:
    looked = perform(request_for)
    (tmp_path / "etc").mkdir()
    late = perform(request_for._replace(expect=looked.identity))
    assert "changed since they were checked" in late.error
    assert list(tree(tmp_path)) == ["etc"]


def test_a_link_is_not_followed(tmp_path: Path, request_for: AdminRequest) -> None:
    carry_out(request_for)
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    stub = tmp_path / "etc" / "prolog"
    stub.unlink()
    stub.symlink_to(victim)
    assert "not a regular file" in perform(request_for).error
    assert victim.read_text() == "mine\n"


def test_concurrent_installs(tmp_path: Path, request_for: AdminRequest) -> None:
    """One of them does it; the others see that it was done meanwhile."""
    looked = perform(request_for)
    replies: list[AdminReply] = []
    order = request_for._replace(expect=looked.identity)
    threads = [threading.Thread(target=lambda: replies.append(perform(order))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(bool(reply.error) for reply in replies) == [False] + [True] * 5
    assert not perform(request_for).changes
    assert not [name for name in tree(tmp_path) if "/." in name], "no drafts are left"
