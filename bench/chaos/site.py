"""The product's stubs in a lab, as robust-admin writes them on a site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.own_prefix import own_prefix
from health.admin.render import Site, node_files
from health.settings_file import END


def epilog_of(lab_dir: Path) -> Path:
    """Return where the epilog of a lab is, for its slurm.conf."""
    return lab_dir / "site" / "epilog"


def install_epilog(lab_dir: Path) -> None:
    """Write the epilog and its settings, before a job runs."""
    etc = epilog_of(lab_dir).parent
    write_site(etc, f'[gate]\nspool = "{etc}/spool"\n', ("epilog",))


def write_site(etc: Path, settings: str, stubs: Sequence[str]) -> None:
    """Make the directory, with robust.toml and some of the stubs in it."""
    etc.mkdir(mode=0o755)
    (etc / "robust.toml").write_text(f"{settings}\n{END}\n")
    site = Site(own_prefix(), str(etc), "", f"{etc}/spool")
    texts = {Path(wanted.path).name: wanted.text for wanted in node_files(site, "")}
    for name in stubs:
        (etc / name).write_text(texts[name])
        (etc / name).chmod(0o755)
