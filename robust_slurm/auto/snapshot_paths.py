"""Make editable installs of the user's directory import from the rank's snapshot of it.

``pip install -e`` leaves a path entry or a finder that names the live directory. In a rank that
runs a snapshot they name the snapshot. Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

TREE, STORE, SOURCE = "ROBUST_CODE_TREE", "ROBUST_CODE_VERSIONS", "ROBUST_CODE_SOURCE"
"""Variables of a rank that runs a snapshot of its code: the snapshot, the folder of all
snapshots, and the user's directory."""


def use(environ: Mapping[str, str]) -> None:
    """Change this interpreter's path and the finders that setuptools has made."""
    source, store, tree = (environ.get(name, "") for name in (SOURCE, STORE, TREE))
    if not (source and store and tree):
        return
    sys.path[:] = [moved(entry, source, store, tree) for entry in sys.path]
    for name, module in list(sys.modules.items()):
        places = getattr(module, "MAPPING", None)
        if name.startswith("__editable__") and isinstance(places, dict):
            places.update({k: moved(str(v), source, store, tree) for k, v in places.items()})
        portions = getattr(module, "NAMESPACES", None)
        if name.startswith("__editable__") and isinstance(portions, dict):
            for each in portions.values():
                each[:] = [moved(str(v), source, store, tree) for v in each]


def moved(path: str, source: str, store: str, tree: str) -> str:
    """Return the path's counterpart in the snapshot ``tree``, if that holds a copy of it.

    ``path`` may be in the ``source`` or in another snapshot in ``store``, also by way of links.
    """
    given = path
    if path and not path.startswith((source + "/", store + "/")):
        path = os.path.realpath(path)
    if path == source or path.startswith(source + "/"):
        inside = path[len(source) + 1 :]
    elif path.startswith(store + "/"):
        inside = path[len(store) + 1 :].partition("/")[2]
    else:
        return given
    there = os.path.join(tree, inside) if inside else tree  # noqa: PTH118
    real = os.path.realpath(there)
    copied = real == tree or real.startswith(tree + "/")  # else a link to what is live
    return there if copied and os.path.exists(there) else given  # noqa: PTH110


def foreign(files: Collection[str], places: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return a path that belongs to another version than the rank's; else "".

    A path of another snapshot does, and a module's file in the user's directory if the rank's
    snapshot has a copy of it. ``files``: of modules; ``places``: other paths that a rank gets.
    """
    source, store, tree = (environ.get(name, "") for name in (SOURCE, STORE, TREE))
    if not store:
        return ""
    for path in (*places, *files):
        if path.startswith(store + "/") and path != tree and not path.startswith(tree + "/"):
            return path
    for path in files if source else ():
        if path.startswith(source + "/") and moved(path, source, store, tree) != path:
            return path
    return ""
