"""The size of what a slot says about its processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from srun_wrapper.protocol.looking_messages import Look, ThreadStack

MOST = 32 << 10  # bytes of a slot
OF_NODE = 768 << 10  # bytes of all slots of a node: they come in one message
OUTER = 8  # innermost frames that a short stack has


def budget(slots: int) -> int:
    """Return the bytes of one of a node's slots."""
    return min(MOST, OF_NODE // max(1, slots))


def bounded(looks: Sequence[Look], most: int = MOST) -> tuple[Look, ...]:
    """Return as many looks as fit, the first ones with the most detail.

    In turn, as far as there is room: each without a stack, with a short stack of its main thread,
    with the whole of that, with all threads.
    """
    shown: list[Look] = []
    left = most
    for look in looks:
        bare = _no_stack(look)
        if (size := _size(bare)) <= left:
            shown.append(bare)
            left -= size
    for form in (_short, _only_main, _whole):
        for n, look in enumerate(looks[: len(shown)]):
            fuller = form(look)
            if (more := _size(fuller) - _size(shown[n])) <= left:
                shown[n] = fuller
                left -= more
    return tuple(shown)


def _size(look: Look) -> int:
    return len(msgspec.msgpack.encode(look))


def _whole(look: Look) -> Look:
    return look


def _short(look: Look) -> Look:
    return _only_main(look, OUTER)


def _only_main(look: Look, frames: int | None = None) -> Look:
    main = tuple(ThreadStack(s.thread, s.frames[:frames]) for s in look.stacks[:1])
    return msgspec.structs.replace(look, stacks=main)


def _no_stack(look: Look) -> Look:
    failed = look.failed or "the stacks of this slot are too long"
    return msgspec.structs.replace(look, stacks=(), failed=failed)
