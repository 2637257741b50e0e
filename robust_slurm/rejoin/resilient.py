"""``resilient``: what a rank runs again, in the same process, when another rank is replaced."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
import traceback

from robust_slurm import claim, heartbeat, layout
from robust_slurm.auto import listening

from . import collectives, entry, renew
from .offer import SUFFIX, Interrupted, RejoinOffer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

PATIENCE = 5.0  # s that a rank whose peers' connections broke waits for the order; then it raises
ENDED = 143  # exit code of a rank that cannot rejoin: robust-task starts another one in its place
_called = False
"""True after the first call. A new rank starts at the first call: no later one may run again."""


def resilient(train_fn: F) -> F:
    """Keep this process when another rank is replaced: ``train_fn`` runs again from its start.

    ::

        model = build_model().cuda()           # once; weights and CUDA context stay
        optimizer = torch.optim.AdamW(model.parameters())

        @robust_slurm.resilient
        def train():
            dist.init_process_group("nccl")
            ddp = DDP(model)
            ckpt = robust_slurm.Checkpointer(model=ddp, optimizer=optimizer, loader=make_loader())
            for step in range(ckpt.resume(), steps):
                ...

        train()

    What belongs to one process group (DDP, FSDP, the Checkpointer, the loader) is made in the
    function, and nothing before it may use torch.distributed. When robust-srun recovers from a
    fault, a rank in the function leaves its collective, waits for the replaced ranks, and the
    function begins again with the new epoch's environment; ``resume`` then restores the last step
    that all ranks have. A rank that does not come back within ``rejoin_limit`` is restarted, as
    every rank is without this. Outside robust-srun the function is just called.
    """

    @functools.wraps(train_fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _called
        why_not = _why_not()
        sockets = collectives.Sockets()
        if why_not is None:
            _called = True
            try:
                first = entry.FirstEntry()
                sockets.watch()
                offer = _offer(sockets)  # last, as it may be asked from now on
            except Exception as error:  # noqa: BLE001 - it trains, and is replaced like any other
                why_not = f"{type(error).__name__}: {error}"
                sockets.unwatch()
        if why_not is not None:
            if why_not:
                _say(f"{_name(train_fn)} runs as without resilient(): {why_not}")
            return train_fn(*args, **kwargs)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else its watchdog kills us
        try:
            result = _rounds(lambda: train_fn(*args, **kwargs), sockets, offer, first)
            gc.unfreeze()
            return result
        except SystemExit:
            gc.unfreeze()
            raise
        finally:  # after an error the heap stays frozen: Python's last collection takes a second
            sockets.unwatch()

    return run  # type: ignore[return-value]


def _why_not() -> str | None:
    """Why this process can never rejoin; "" where nobody expects it to, None if it can."""
    if "ROBUST_BEAT_DIR" not in os.environ or os.environ.get("ROBUST_REPLAY") == "1":
        return ""
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return "below torchrun all ranks are restarted"
    if threading.current_thread() is not threading.main_thread():
        return "it is not called in the main thread"
    if _called:
        return "another call was before it, at which a new rank would begin"
    if collectives.initialized():
        return "torch.distributed was initialised before it; do that in the function"
    if renew.checkpointers():
        return "a Checkpointer was made before it; make it in the function"
    return None


def _rounds(
    call: Callable[[], Any],
    sockets: collectives.Sockets,
    offer: RejoinOffer,
    first: entry.FirstEntry,
) -> Any:
    gc.freeze()  # else each garbage collection walks through all of torch
    begin = 0.0
    while True:
        result, error = None, None
        try:
            try:
                listening.hold(begin)
                result = call()
            except BaseException as raised:  # noqa: BLE001 - raised again, unless it rejoins
                error = raised
            if error is not None and not offer.ordered.is_set() and collectives.by_peers(error):
                _wait_for_order(offer)
        except Interrupted as late:  # the function is over already
            error = error or late
        if not offer.end():
            if error is not None:
                raise error
            return result
        offer, begin = _rejoin(offer, sockets, first, error)
        result = error = None


def _offer(sockets: collectives.Sockets) -> RejoinOffer:
    def leave() -> None:
        heartbeat._end()
        sockets.shut()
        collectives.abort_nccl()

    path = layout.beside(claim.record_path(heartbeat.epoch(), None), SUFFIX)
    return RejoinOffer(path, leave, collectives.has_nccl)


def _wait_for_order(offer: RejoinOffer) -> None:
    """Wait for the order: connections to peers broke, and robust-srun may be about to recover."""
    try:
        with heartbeat.phase("rejoin"):
            offer.ordered.wait(PATIENCE)
    except Interrupted:  # that is the order
        pass


def _rejoin(
    offer: RejoinOffer,
    sockets: collectives.Sockets,
    first: entry.FirstEntry,
    error: BaseException | None,
) -> tuple[RejoinOffer, float]:
    """Become a rank of the next epoch. Return its offer, and when the function may begin.

    The time is for ``listening.hold``. A rank that cannot rejoin ends here, and is replaced.
    """
    try:
        renew.close_checkpointers()
        renew.let_go_loaders()
        _let_go(error)
        listening.visits = listening.visits or listening.is_used()
        collectives.take_down()
        sockets.next_round()
        first.check()
        offer.ready()
        # The new ranks start meanwhile. A cycle may hold DDP, whose hooks on the weights must go.
        error = None
        gc.collect()
        gc.freeze()
        order = offer.wait()
        if order is None:
            os._exit(ENDED)
        renew.begin(order)
        begin = time.monotonic() + float(order.get("wait", 0.0))  # older robust-tasks send none
        first.put_back()
        following = _offer(sockets)
        offer.going()
    except BaseException as raised:  # noqa: BLE001 - robust-task starts another one
        _say(f"this rank cannot rejoin: {type(raised).__name__}: {raised}")
        os._exit(ENDED)
    return following, begin


def _let_go(error: BaseException | None) -> None:
    """Release what the function's frames hold: process groups, hooks, loaders."""
    found, seen = [error], set()
    while found:
        error = found.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        found += error.__cause__, error.__context__


def _name(train_fn: Callable[..., Any]) -> str:
    return str(getattr(train_fn, "__name__", train_fn))


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"robust-slurm: {text}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass  # no usable stderr
