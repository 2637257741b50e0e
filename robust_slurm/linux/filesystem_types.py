"""The types of file systems that another machine, or a user's process, serves.

The job's side takes all of them for innocent: a rank that waits for one hangs through no fault of
its node. The gate judges a node by those of NETWORK, and by a user's ``fuse.…``.
"""

from __future__ import annotations

NETWORK = frozenset(
    (
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb3"),
        *("afs", "glusterfs", "orangefs", "panfs"),
    )
)
"""File systems of a site, whose server is elsewhere."""

SERVED = NETWORK | frozenset(
    (
        *("9p", "virtiofs"),  # of a virtual machine's host: may be /, which the gate must read
        "dvs",  # Cray's forwarding: may be / as well
        *("mmfs", "pvfs2"),  # other names of gpfs and orangefs, which no gate has judged yet
        "fuse",  # any user's; "fuse.sshfs" and its like
    )
)


def is_served(kind: str) -> bool:
    """Return whether another machine, or a user's process, answers for this type."""
    return kind.partition(".")[0] in SERVED
