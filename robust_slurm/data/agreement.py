"""Check at the first start of a training that all ranks have the same plan: else their rows differ.

The first rank to get here writes its plan into torch.distributed's store; the others compare. No
rank waits for another one. A loader that a rank makes later of the same plan is not compared: the
files may have changed on all nodes since.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .planning.state import difference
from .service.client import code_of

if TYPE_CHECKING:
    from collections.abc import Callable


_compared: dict[str, weakref.ref[Any]] = {}
"""The store in which this process compared each plan: after a rejoin it is another one."""


def agree(name: str, world: str, identity: Callable[[], dict[str, Any]]) -> None:
    """Compare the plan ``name`` with that of the other ranks, if torch.distributed runs. ``world``:
    whatever else tells plans apart; ``identity``: returns ``Plan.identity``. Raises DataError."""
    store = _store()
    if store is None:
        return
    key = hashlib.blake2b(f"{name} {world}".encode(), digest_size=8).hexdigest()
    if key in _compared and _compared[key]() is store:
        return
    text = json.dumps(
        [
            f"rank {os.environ.get('RANK', '?')} on {os.uname().nodename}",
            {"code and file of the plan": code_of(name), **identity()},
        ],
        separators=(",", ":"),
    )
    here, mine = json.loads(text)  # as the others read it: a user's source may have tuples
    try:
        reference = weakref.ref(store)
        there, theirs = json.loads(store.compare_set(f"robust_slurm.data/{key}", "", text))
    except Exception:  # noqa: BLE001 - of whatever store it is: then the training itself says why
        return
    # Sorted, so that any rank raises the same text: robust-srun recognises an error by its text.
    (one, left), (two, right) = sorted(
        ((there, theirs), (here, mine)), key=lambda each: str(each[1])
    )
    if found := difference(left, right, names=(f"of {one}", f"of {two}")):
        raise DataError(
            f"{name} is not the same on all ranks: {found}. Give all nodes the same files and code"
        )
    _compared[key] = reference


def _store() -> Any:
    """Return the store that all ranks share; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        return distributed.distributed_c10d._get_default_store()
    except Exception:  # noqa: BLE001 - another version of torch
        return None
