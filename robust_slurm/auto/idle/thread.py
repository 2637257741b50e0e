"""Runs a function in a thread that gets a processor only when nobody else wants it.

Linux schedules threads, and SCHED_IDLE cannot be left again without CAP_SYS_NICE or RLIMIT_NICE,
which a job does not have. So the thread that becomes a rank by fork, the main thread, never enters
it: it waits for another thread that does, and that ends. What a thread has for itself is carried
over from there, so that imports leave what they would have left in the main thread.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

STACK = 16 << 20  # bytes; a main thread has 8 MiB, a thread may have 2 MiB or less
_LAST = 5.0  # s for a thread that has ended to leave /proc
_FENV = 64  # bytes; fenv_t has 32 on x86-64, 16 at most elsewhere
_GROUP = "/proc/self/autogroup"
_TRIES, _TURN = 20, 0.11  # one change of an autogroup in 0.1 s is allowed, of all on the machine
SHARES = ((0.0, 19), (2.0, 10), (4.0, 5), (6.0, 0))
"""Niceness of the session from so many seconds on: other ones may leave it no time at all."""


def run_idle(work: Callable[[], Any], *, session: bool = False) -> Any:
    """Return what ``work`` returns; raises what it raises. Called in the main thread, as the only
    one. ``session``: lower the share of this process's session at first; it is never a rank's.
    Raises RuntimeError if what ``work`` has made belongs to its thread alone."""
    import threading
    from contextvars import copy_context

    context, own = copy_context(), {id(each) for each in _locals()}
    before, traced = os.sched_getaffinity(0), _traced()
    _share_imports()
    result: list[Any] = []
    error: list[BaseException] = []
    left: list[tuple[Any, dict[str, Any]]] = []
    mode = _Arithmetic()
    signals = _Signals()

    def run() -> None:
        try:
            _lower()
            with signals:
                result.append(context.run(work))
            if os.sched_getaffinity(0) != before:
                raise RuntimeError("importing chooses processors, so it cannot be done ahead")
            _check_torch()
            if _traced() and not traced:
                raise RuntimeError("importing traces its thread, so it cannot be done ahead")
            made = [each for each in _locals() if id(each) not in own]
            left.extend((each, dict(_of_thread(each))) for each in made)
            mode.read()
        except BaseException as caught:  # noqa: BLE001 - raised in the main thread
            error.append(caught)

    if session:
        _set_group(SHARES[0][1])
    began, size = time.monotonic(), threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, name="robust-slurm", daemon=True)
        thread.start()
    finally:
        threading.stack_size(size)
    for since, nice in SHARES[1:] if session else ():
        thread.join(max(0.0, began + since - time.monotonic()))
        if not thread.is_alive():
            break
        _set_group(nice)
    thread.join()
    _wait_alone(thread.native_id)
    if session:
        _set_group(0)
    if error:
        raise error[0]
    for variable, value in context.items():
        variable.set(value)
    for local, values in left:
        _of_thread(local).update(values)
    _stash()
    mode.write()
    signals.install()
    return result[0]


def _share_imports() -> None:
    """Let other threads have the modules that the calling thread is in the middle of importing, as
    it has them itself: ``site`` imports ``sitecustomize``, and they would wait for its end."""
    import _frozen_importlib

    locks: dict[str, Any] = vars(_frozen_importlib).get("_module_locks", {})
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            locks.pop(name, None)


# -- its priority


def _lower() -> None:
    """Lower the calling thread's priority. Its disk accesses have idle priority by that, too."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        pass  # a sandbox forbids it; the pace of imports is still the ranks'


def _set_group(nice: int) -> None:
    """Change the share of this session. Where no control group divides the processors, the kernel
    divides them among sessions, and SCHED_IDLE counts within a session only. It may be changed both
    ways, but not often: it may stay low. A session that is made later has its own."""
    if os.getsid(0) != os.getpid():
        return  # it is not ours alone
    for _ in range(_TRIES):
        try:
            fd = os.open(_GROUP, os.O_WRONLY)
        except OSError:
            return
        try:
            os.write(fd, b"%d" % nice)
            return
        except BlockingIOError:
            time.sleep(_TURN)
        except OSError:
            return
        finally:
            os.close(fd)


def _wait_alone(thread: int | None) -> None:
    """Wait until the kernel has forgotten the thread: a fork beside another thread is a warning."""
    end = time.monotonic() + _LAST
    while os.path.exists(f"/proc/self/task/{thread}") and time.monotonic() < end:  # noqa: PTH110
        time.sleep(0.001)


# -- what a thread has for itself


def _traced() -> bool:
    return sys.gettrace() is not None or sys.getprofile() is not None


def _locals() -> list[Any]:
    import gc
    import threading

    return [found for found in gc.get_objects() if issubclass(type(found), threading.local)]


def _of_thread(local: Any) -> dict[str, Any]:
    """The values that an object has in the calling thread."""
    import threading

    values: dict[str, Any] = threading.local.__getattribute__(local, "__dict__")
    return values


def _stash() -> None:
    """Have torch hand on to the threads of its autograd what CUDA graphs are kept in: it copies
    that from the thread that has loaded the module."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    stash = getattr(getattr(sys.modules.get("torch"), "_C", None), "_stash_obj_in_tls", None)
    if stash is not None and hasattr(trees, "local"):
        for name, value in _of_thread(trees.local).items():
            stash(name, value)


class _Arithmetic:
    """The mode of floating-point arithmetic: a library may be built to change it when loaded. What
    numpy does with errors is the thread's, too (before 2.0)."""

    def __init__(self) -> None:
        import ctypes

        self._had_numpy = "numpy" in sys.modules
        self._errors: Any = None
        self._library: Any = ctypes.CDLL(None)
        self._mode = ctypes.create_string_buffer(_FENV)
        self._known = False

    def read(self) -> None:
        self._known = hasattr(self._library, "fegetenv") and not self._library.fegetenv(self._mode)
        get = getattr(sys.modules.get("numpy"), "geterr", None)
        if get is not None and not self._had_numpy:
            self._errors = get()

    def write(self) -> None:
        if self._known:
            self._library.fesetenv(self._mode)
        if self._errors is not None:
            vars(sys.modules["numpy"])["seterr"](**self._errors)


class _Signals:
    """Keeps the handlers that imports set, until the main thread sets them: it alone may."""

    def __init__(self) -> None:
        import signal

        self._set: Any = signal.signal
        self._over = False
        self._wanted: dict[int, Any] = {}

    def _later(self, number: int, handler: Any) -> Any:
        """Stands in for ``signal.signal``; a module may keep it."""
        import signal

        if self._over:
            return self._set(number, handler)
        before = self._wanted.get(number, signal.getsignal(number))
        self._wanted[number] = handler
        return before

    def __enter__(self) -> None:
        import signal

        vars(signal)["signal"] = self._later

    def __exit__(self, *_: object) -> None:
        import signal

        vars(signal)["signal"] = self._set
        self._over = True

    def install(self) -> None:
        for number, handler in self._wanted.items():
            self._set(number, handler)


def _check_torch() -> None:
    """Raise RuntimeError if imports have left torch in another mode: it is the thread's."""
    torch: Any = sys.modules.get("torch")
    usual = (("is_grad_enabled", True), ("is_inference_mode_enabled", False))
    for name, value in (*usual, ("is_autocast_enabled", False)):
        mode = getattr(torch, name, None)
        if mode is not None and mode() != value:
            raise RuntimeError(f"importing changes torch.{name}(), so it cannot be done ahead")
    for name in ("_len_torch_function_stack", "_len_torch_dispatch_stack"):  # a default device
        length = getattr(getattr(torch, "_C", None), name, None)
        if length is not None and length():
            raise RuntimeError("importing sets a mode of torch, so it cannot be done ahead")
