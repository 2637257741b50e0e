"""The product's epilog in a lab, as robust-admin writes it on a site."""

from __future__ import annotations

import sys
from pathlib import Path

from health.admin.render import Site, find_prefix, node_files


def epilog_of(lab_dir: Path) -> Path:
    """Return where the epilog of a lab is, for its slurm.conf."""
    return lab_dir / "site" / "epilog"


def install_epilog(lab_dir: Path) -> None:
    """Write the epilog and its settings, before a job runs."""
    path = epilog_of(lab_dir)
    path.parent.mkdir(mode=0o755)
    spool = str(path.parent / "spool")
    site = Site(find_prefix(sys.prefix), str(path.parent), "", spool)
    files = {Path(wanted.path).name: wanted for wanted in node_files(site, "")}
    (path.parent / "robust.toml").write_text(f'[gate]\nspool = "{spool}"\n')
    path.write_text(files["epilog"].text)
    path.chmod(0o755)
