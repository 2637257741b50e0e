"""The rank's side of the heartbeat: write progress into a record in shared memory.

``beat`` and ``phase`` cost a store into mapped memory: no system call, lock or thread. The
record is claimed at the first use (under 1 ms, once). Whatever goes wrong there ends in one
warning on stderr and in calls that do nothing; nothing here raises into a training.

One process owns a record. The claim is a POSIX lock on the file, which the kernel drops with the
process and which a forked child does not inherit, so neither a reused pid nor a zombie can keep a
record, and two processes can never both own it.

Standard library only, nothing imported that a bare interpreter does not need, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import struct
import sys
import time

from . import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, SupportsFloat, SupportsIndex, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

_clock = time.monotonic
_pack_beat = layout.BEAT.pack_into
_pack_phase = layout.PHASE.pack_into
_pack_proven = layout.PROVEN.pack_into
_BEAT_AT = layout.BEAT_AT
_ABSENT = layout.ABSENT

_map: Any = None  # mmap of the record; None until claimed, and outside robust-srun
_off = "ROBUST_BEAT_DIR" not in os.environ  # nothing to claim, now or later
_fd = -1  # holds the lock: closing any descriptor of the file would drop it
_path = ""
_beats = 0
_auto_steps = 0
_auto_source = layout.AUTO
_explicit = False  # the script calls beat() itself: automatic steps are not counted any more
_saves = False  # Checkpointer.save() reports the steps: automatic ones are not counted either
_phases = 0
_nan = False  # the newest loss that was given is not finite
# A finite loss proves the state that it was computed from. That is the newest saved one, or where
# save() comes before beat() in a step the one before that.
_saved_last = layout.NO_STEP
_saves_first: bool | None = None
_used = layout.NO_STEP  # step of the state that the next loss is computed from
_proven = layout.NO_STEP  # newest such step of a finite loss
_assumed = layout.NO_STEP  # the value of _proven that a resume has set, and no loss has shown
_stack: list[bytes] = []
_ended = False
rejoined = False  # this process was a rank of an earlier epoch, and is to resume (``rejoin``)
_warned = False
_fork_hook = False


def beat(
    step: SupportsIndex,
    *,
    loss: SupportsFloat | None = _ABSENT,
    grad_norm: SupportsFloat | None = _ABSENT,
) -> None:
    """Report that training step ``step`` is done, with its loss and gradient norm if at hand.

    Pass Python numbers. A tensor is converted, and for one on a GPU this waits for the GPU: call
    ``beat(step)`` alone rather than synchronise for it. Call it from one thread.
    """
    global _beats, _explicit, _proven
    if _map is None and (_off or not _claim()):
        return
    # A conversion may take long or raise; it must be over before the record is touched.
    if step.__class__ is not int or loss.__class__ is not float or grad_norm.__class__ is not float:
        step, loss, grad_norm = _step(step), _number(loss), _number(grad_norm)
    _explicit = True
    _beats = n = _beats + 1
    if loss - loss == 0.0:  # type: ignore[operator] # a float by now; finite
        if _nan:
            _finite_again()
        _proven = _used
    elif loss is not _ABSENT and not _nan:
        _not_finite(n, step, loss)  # type: ignore[arg-type]
    try:
        _pack_beat(_map, _BEAT_AT, n, step, _clock(), loss, grad_norm, 1, n)
    except struct.error:  # a step beyond 64 bits
        _pack_beat(_map, _BEAT_AT, n, layout.NO_STEP, _clock(), loss, grad_norm, 1, n)
    if n == 1:
        _first_step()


def _not_finite(beats: int, step: int, loss: float) -> None:
    """The first loss that is not finite: the record keeps it until one is finite again."""
    global _nan
    if os.environ.get("ROBUST_NAN") == "ignore":
        return
    _nan = True
    layout.write_nan(_map, beats, step, _proven, loss)


def _finite_again() -> None:
    global _nan
    _nan = False
    layout.clear_nan(_map)


def _auto_step(optimizer: Any = None) -> None:
    """One optimizer step was seen by the hook; counts until the script beats by itself."""
    global _beats, _auto_steps, _auto_source
    if _explicit or _saves or (_map is None and (_off or not _claim())):
        return
    _auto_steps += 1
    _beats = n = _beats + 1
    if n == 1:
        _auto_source = layout.ANEW if epoch() > 1 and _made_one_step(optimizer) else layout.AUTO
    _pack_beat(_map, _BEAT_AT, n, _auto_steps, _clock(), _ABSENT, _ABSENT, _auto_source, n)
    if n == 1:
        _first_step()


def _made_one_step(optimizer: Any) -> bool:
    """Return whether the optimizer's own count of steps, where it keeps one, is 1."""
    try:
        for state in optimizer.state.values():
            step = state["step"]
            device = getattr(step, "device", None)
            if device is not None and device.type == "cuda":
                import torch

                if torch.cuda.is_current_stream_capturing():
                    return False
            return float(step) == 1.0
    except Exception:  # noqa: BLE001 - an unusual optimizer: nothing is known
        pass
    return False


def _expect_saves() -> None:
    """Checkpointer.resume() was called: save() will report the steps."""
    global _saves
    _saves = True


def _resumed_step(step: int) -> None:
    """Checkpointer.resume() has restored this step; its state is still to be proven."""
    global _saved_last, _used, _proven, _assumed
    _saved_last = _used = step
    _proven = _assumed = step - 1


def _saved_step(step: int) -> None:
    """Checkpointer.save() was called with this step; a beat, unless the script beats by itself."""
    global _explicit, _saves_first, _saved_last, _used
    if _saves_first is None:
        _saves_first = not _explicit
    if _map is not None and _proven != _assumed:
        _pack_proven(_map, layout.PROVEN_AT, _beats, _proven, _beats)
    _used = _saved_last if _saves_first else step
    _saved_last = step
    if not _explicit:
        _expect_saves()
        beat(step)
        _explicit = False


class phase:
    """``with phase("eval"):`` or ``@phase("eval")``: a stretch in which no steps are expected.

    Phases nest; leaving one, also by an exception, returns to the one around it. The name is cut
    to 31 bytes of UTF-8. Entering and leaving are signs of life in their own right.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = layout.encode_name(str(name))

    def __enter__(self) -> None:
        _stack.append(self._name)
        _write_phase()

    def __exit__(self, *exc: object) -> None:
        if _stack:
            _stack.pop()
        _write_phase()

    def __call__(self, function: F) -> F:
        from functools import wraps

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def attach(local_rank: int | None = None) -> bool:
    """Claim this node's record of ``local_rank`` (default: $LOCAL_RANK) for this process.

    Only needed in a rank that is a child of ``multiprocessing`` or of a bare fork (``mp.spawn`` as
    launcher): such children are taken for data loader workers and are otherwise left out. False
    when there is nothing to attach to or another live process owns the record.
    """
    global _off
    if _map is not None:
        from . import claim

        if local_rank is None or _path == claim.record_path(epoch(), local_rank):
            return True
    _detach()
    _off = False
    return _claim(local_rank, explicit=True)


def epoch() -> int:
    """Number of this incarnation of the world of ranks: 1 at first; 0 outside robust-srun."""
    return _env_int("ROBUST_EPOCH") or 0


def restart_reason() -> str | None:
    """Reason for the start of this incarnation; None in the first one and outside robust-srun."""
    return os.environ.get("ROBUST_RESTART_REASON") or None


def resume_step() -> int | None:
    """The step to resume from, when robust-srun knows it; None when the script has to find it.

    ``Checkpointer.resume()`` goes by the same plan: with it, nobody needs to ask here.
    """
    return _env_int("ROBUST_RESUME_STEP")


def _env_int(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def _step(step: Any) -> int:
    try:
        return step.__index__()  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - user objects; a heartbeat never raises into training
        _warn(f"beat() got a step that is not an integer ({error}); it is counted without a number")
        return layout.NO_STEP


def _number(value: Any) -> float:
    if value is None:
        return _ABSENT
    try:
        return float(value)
    except Exception as error:  # noqa: BLE001 - user objects; a heartbeat never raises into training
        _warn(f"beat() got a loss or grad_norm that is not a number ({error}); it is left out")
        return _ABSENT


def _write_phase() -> None:
    global _phases
    if _map is None and (_off or not _claim()):
        return
    name = _stack[-1] if _stack else b""
    _phases = n = _phases + 1
    _pack_phase(_map, layout.PHASE_AT, n, _clock(), len(_stack), len(name), name, n)


def _claim(local_rank: int | None = None, explicit: bool = False) -> bool:
    """Map and own the record; on any failure switch off for good."""
    global _off, _map, _fd, _path, _beats, _phases, _auto_steps, _fork_hook, _nan
    warm: Any = sys.modules.get("robust_slurm.auto.warm")
    if warm is not None and warm._ahead is not None:
        return False  # runs ahead of standby_point(): which rank it will be is not known yet
    _off = True
    if "ROBUST_BEAT_DIR" not in os.environ or (not explicit and _is_multiprocessing_child()):
        return False
    path = ""
    try:
        from . import claim

        path = claim.record_path(epoch(), local_rank)
        found = claim.claim(path, epoch(), local_rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without a heartbeat
        _warn(
            f"no heartbeat from this process: {path or 'ROBUST_BEAT_DIR'}: {error}. Training "
            f"continues; steps can still be seen with --robust-progress-regex"
        )
        return False
    if found is None:  # a live process owns it: this one is a helper of the rank
        return False
    if not _fork_hook:
        _fork_hook = True
        os.register_at_fork(after_in_child=_after_fork)
    (_map, _fd), _path = found, path
    _beats = _phases = _auto_steps = 0
    _off = _nan = False
    return True


def _is_multiprocessing_child() -> bool:
    # Never imported for the question: a child of multiprocessing has it loaded already.
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _first_step() -> None:
    """Report to the shim what the first step has made available: imports, and communicators."""
    _tell_imports()
    if "torch.distributed" in sys.modules:
        try:
            from .auto import flights, teardown

            flights.offer(layout.beside(_path, flights.SUFFIX))
            teardown.offer(layout.beside(_path, teardown.SUFFIX), _end)
        except Exception as error:  # noqa: BLE001 - an unusual torch must still train
            _warn(f"communicators will not be aborted before the rank is killed: {error!r}")


def _end() -> None:
    """End the heartbeat: this process's further results are worth nothing."""
    global _map, _off, _ended
    _map, _off, _ended = None, True, True


def _tell_imports() -> None:
    """Report at the first step what is imported, so that the next start can import it ahead.

    Not in a forked rank: to look at every module would copy thousands of its pages.
    """
    warm = sys.modules.get("robust_slurm.auto.warm")
    if os.environ.get("ROBUST_LEARN") != "1" or getattr(warm, "forked", False):
        return
    try:
        from .auto import learnt

        learnt.tell(layout.beside(_path, learnt.SUFFIX))
    except Exception as error:  # noqa: BLE001 - then the next start is a cold one
        _warn(f"this process's imports cannot be reported: {error}. The next start is slower")


def _detach() -> None:
    global _map, _fd, _path
    if _fd >= 0:
        os.close(_fd)
    _map, _fd, _path = None, -1, ""


def _after_fork() -> None:
    """In a forked child: the mapped record is the parent's, so write into it never again."""
    global _off
    if _map is not None:
        _detach()
        _off = True


def _warn(text: str) -> None:
    global _warned
    if _warned or sys.stderr is None:
        return
    _warned = True
    try:
        sys.stderr.write(f"robust-slurm: {text}\n")
    except (OSError, ValueError):
        pass  # stderr is closed: there is nobody to tell
