"""The types of file systems that are served: the job's side knows all, the gate judges some."""

from __future__ import annotations

import pytest

from health.node import mountinfo
from robust_slurm.linux.filesystem_types import is_served
from srun_wrapper.agent.filesystems import UsedMount

SITE = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb3"),
    *("afs", "glusterfs", "orangefs", "panfs"),
)


@pytest.mark.parametrize(
    ("kind", "job", "gate"),
    [
        *((kind, True, True) for kind in SITE),
        *((kind, True, False) for kind in ("9p", "virtiofs", "dvs", "mmfs", "pvfs2", "fuse")),
        ("fuse.sshfs", True, True),
        *((kind, False, False) for kind in ("ext4", "tmpfs", "overlay", "fuseblk", "autofs", "")),
    ],
)
def test_who_takes_a_type_for_served(kind: str, job: bool, gate: bool) -> None:
    assert UsedMount("/x", kind).shared is is_served(kind) is job
    assert mountinfo.is_remote(kind) is gate
