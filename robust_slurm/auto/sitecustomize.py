"""Imported by every Python of a rank at its start, because the shim put this directory first.

It does three things and then gets out of the way:

1. ``import robust_slurm`` works although the user's interpreter may not have it installed: a last
   resort finder for that one name, so that nothing else of ours becomes visible.
2. When ``torch.optim.optimizer`` is imported, registers torch's own global hook that runs after
   every optimizer step, and reports the steps as progress. ``ROBUST_AUTO=0`` leaves this out.
3. Takes its directory off sys.path and runs the ``sitecustomize`` that would have run without us.

In an interpreter that the shim keeps warm (``warm``) it waits before 3 until a rank is wanted.

PYTHONPATH itself stays, so that the children of a launcher such as torchrun are seen too.

It runs in interpreters that are not ours: no import beyond what the interpreter has loaded
anyway, Python 3.9 syntax, and no exception of ours may ever reach the user's program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(__file__)  # noqa: PTH120 - pathlib costs more than all of this file
_TORCH_MODULE = "torch.optim.optimizer"
_LAUNCHER_MODULE = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_ENVIRON = dict(os.environ)  # before the script may change it


def _warn(error: object) -> None:
    try:
        sys.stderr.write(
            f"robust-slurm: automatic step counting is off in this process: {error!r}. Training "
            f"continues; call robust_slurm.beat(step) to report progress\n"
        )
    except (AttributeError, OSError, ValueError):
        pass  # no usable stderr: there is nobody to tell


class _OurPackage:
    """Finder of last resort for ``robust_slurm`` beside this directory."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "robust_slurm":
            return None
        from importlib.util import spec_from_file_location

        package = os.path.dirname(_HERE)  # noqa: PTH120
        init = os.path.join(package, "__init__.py")  # noqa: PTH118
        return spec_from_file_location(name, init, submodule_search_locations=[package])


class _WaitFor:
    """Finder that finds nothing itself, and acts once, when a module has been loaded."""

    def __init__(self, module: str, action: Callable[[Any], None]) -> None:
        self._module = module
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _after_exec(spec.loader, self._action)
                return spec
        return None


def _after_exec(loader: Any, action: Callable[[Any], None]) -> None:
    """Have ``action(module)`` run once, when ``loader`` has executed its module.

    The loader object stays what it is (tools look at it); only its one method is shadowed.
    """

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        action(module)

    try:
        loader.exec_module = exec_module
    except (AttributeError, TypeError) as error:
        _warn(error)


def _register(module: Any) -> None:
    try:
        from robust_slurm import looked
        from robust_slurm.auto import learnt

        looked.allow()  # data loader workers that are spawned get here, too
        learnt.importing_torch(_ENVIRON)
        before, after = _make_hooks()
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)
    except Exception as error:  # noqa: BLE001 - an old or unusual torch must still train
        _warn(error)


def _hook_launcher(module: Any) -> None:
    try:
        from robust_slurm.auto import launched

        launched.hook(module)
    except Exception as error:  # noqa: BLE001 - then torchrun starts its ranks as always
        _warn(error)


def _make_hooks() -> tuple[Callable[..., None], Callable[..., None]]:
    """The functions that torch calls before and after each ``step`` of any optimizer."""
    from _weakref import ref

    from robust_slurm.heartbeat import _auto_step

    counted: Any = None
    stepping = False

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal stepping
        stepping = True

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the steps of the first optimizer seen; of the next one when that is gone."""
        nonlocal counted, stepping
        try:
            if counted is None or counted() is not optimizer:
                if counted is not None and counted() is not None:
                    return
                counted = ref(optimizer)
            # A subclass whose step() calls super().step() gets here twice: before, before, after,
            # after. The first "after" counts. A step that raised leaves nothing to clean up.
            if stepping:
                stepping = False
                _auto_step(optimizer)
        except Exception as error:  # noqa: BLE001 - progress reports must not end a training
            _warn(error)

    # torch.compile must run these as they are, not trace into them.
    before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    return before_step, after_step


def _install() -> None:
    sys.__dict__["_robust_slurm_hook"] = True  # for ``learnt``
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    sys.meta_path.append(_OurPackage())
    if "ROBUST_BEAT_DIR" in os.environ and os.environ.get("ROBUST_AUTO") != "0":
        sys.meta_path.insert(0, _WaitFor(_TORCH_MODULE, _register))
    if "ROBUST_TORCHRUN_BROKER" in os.environ:
        sys.meta_path.insert(0, _WaitFor(_LAUNCHER_MODULE, _hook_launcher))


def _wait_if_warm() -> None:
    fd = os.environ.pop("ROBUST_WARM_FD", "")
    if not fd:
        return
    known = frozenset(sys.modules)
    try:
        from robust_slurm.auto import listening, warm

        begin = warm.serve(int(fd), known)
    except BaseException:  # noqa: BLE001 - it must never run the script a second time
        os._exit(1)
    listening.hold(begin)  # as a rank: signals do to it what they do to any other


def _use_snapshot() -> None:
    """Have editable installs of the code's directory import from the rank's snapshot."""
    if "ROBUST_CODE_TREE" in os.environ:
        from robust_slurm.auto import snapshot_paths

        snapshot_paths.use(os.environ)


def _chain() -> None:
    """Run the sitecustomize behind us; what it raises is its own affair, as without us."""
    ours = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        sys.modules[__name__] = ours
        if error.name != __name__:
            raise


if __name__ == "sitecustomize":
    try:
        _install()
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        _warn(error)
    _wait_if_warm()
    try:
        _use_snapshot()
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        _warn(error)
    _chain()
