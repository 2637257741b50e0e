"""Lists of nodes as an admin writes and reads them: ``n[1-99]``."""

from __future__ import annotations

from collections.abc import Iterable

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from health.admin.install import InstallError

MOST_NODES = 20_000


def expand(expression: str) -> list[str]:
    """The names in ``n[1-99]``. Raises InstallError for what is no list of hosts."""
    try:
        names = NodeSet(expression, resolver=RESOLVER_NOGROUP)
        if not 0 < len(names) <= MOST_NODES:
            raise InstallError(f"--nodes {expression[:80]!r}: 1 to {MOST_NODES} nodes, please")
        found = [str(name) for name in names]
    except NodeSetException as error:
        raise InstallError(f"--nodes {expression[:80]!r}: {error}") from error
    return found


def fold(names: Iterable[str]) -> str:
    """The names as one expression."""
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))
