"""The effects of a fault on a node's GPUs: NVML's answers and the kernel's words (pure)."""

import re
from collections.abc import Callable
from typing import NamedTuple

from lab.errors import LabError
from lab.machine import kernlog
from lab.machine.hardware import Hardware
from lab.machine.kernlog import Line

# Reasons why clocks are below the highest: NVML's nvmlClocksEventReason… masks.
THROTTLE = {
    "idle": 0x1,
    "application-clocks": 0x2,
    "sw-power-cap": 0x4,
    "hw-slowdown": 0x8,
    "sync-boost": 0x10,
    "sw-thermal": 0x20,
    "hw-thermal": 0x40,
    "power-brake": 0x80,
}
LOST = ("handle", "calls", "absent")
_WIDTHS = ("1", "2", "4", "8", "16")
_CURED_BY_RESET = re.compile(
    r"ecc\.volatile_.*|remap\.pending|recovery_action|throttle|hang|hang\..*|error\..*|processes"
)
_REBOOT_ONLY = "2"  # the recovery action "Node Reboot Required"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


class Change(NamedTuple):
    """Keys of the fake NVML to set (None: to take away), and what the kernel logs."""

    nvml: dict[str, str | None]
    log: list[Line]


def change(hardware: Hardware, index: int | None, what: str, value: str) -> Change:
    """Return the effect of `what` (a key of the tables below) on GPU `index`; None: the node."""
    if not hardware.gpus:
        raise LabError("the lab has no GPUs; bring one up with --gpus N")
    if index is None:
        if what not in _OF_NODE:
            raise LabError(f"{what}: say which GPU")
        return _OF_NODE[what](hardware, value)
    if not 0 <= index < hardware.gpus:
        raise LabError(f"{hardware.node} has no GPU {index}; there are: 0..{hardware.gpus - 1}")
    if what not in _OF_GPU:
        raise LabError(f"{what} is about the node, not about one GPU")
    return _OF_GPU[what](hardware, index, value)


def _keys(index: int, **nvml: object) -> dict[str, str | None]:
    """Keys of a GPU; "__" stands for the dot."""
    return {f"gpu{index}.{key.replace('__', '.')}": str(value) for key, value in nvml.items()}


def _number(what: str, value: str, highest: int = 1 << 62) -> int:
    try:
        number = int(value)
    except ValueError:
        raise LabError(f"{what} wants a number, not {value!r}") from None
    if not 0 <= number <= highest:
        raise LabError(f"{what} wants 0..{highest}, not {number}")
    return number


def _xid(_: Hardware, index: int, value: str) -> Change:
    code, __, text = value.partition(" ")
    if "\n" in text:
        raise LabError("--text wants one line")
    return Change({}, [kernlog.xid(index, _number("--xid", code, 9999), text)])


def _ecc(hardware: Hardware, index: int, value: str) -> Change:
    count = _number("--ecc", value)
    life = count + hardware.number(index, "ecc.aggregate_uncorrected", 0)
    nvml = _keys(index, ecc__volatile_uncorrected=count, ecc__aggregate_uncorrected=life)
    return Change(nvml, [kernlog.xid(index, 48)] if count else [])


def _lost(hardware: Hardware, index: int, value: str) -> Change:
    if value not in LOST:
        raise LabError(f"--lost wants one of {', '.join(LOST)}, not {value!r}")
    log = [kernlog.xid(index, 79), *kernlog.fallen_off(hardware.node, index)]
    return Change(_keys(index, lost=value), log)


def _remap_failed(_: Hardware, index: int, __: str) -> Change:
    return Change(_keys(index, remap__failed=1), [kernlog.xid(index, 64)])


def _remap_pending(hardware: Hardware, index: int, _: str) -> Change:
    rows = 1 + hardware.number(index, "remap.uncorrected", 0)
    nvml = _keys(index, remap__pending=1, remap__uncorrected=rows)
    return Change(nvml, [kernlog.xid(index, 63)])


def _pcie_width(_: Hardware, index: int, value: str) -> Change:
    if value not in _WIDTHS:
        raise LabError(f"--pcie-width wants one of {', '.join(_WIDTHS)}, not {value}")
    return Change(_keys(index, pcie__width=value), [])


def _recovery_action(hardware: Hardware, index: int, value: str) -> Change:
    new = _number("--recovery-action", value, 99)
    old = hardware.number(index, "recovery_action", 0)
    log = [] if new == old else [kernlog.recovery(index, old, new)]
    return Change(_keys(index, recovery_action=new), log)


def _temp(_: Hardware, index: int, value: str) -> Change:
    return Change(_keys(index, temperature__gpu=_number("--temp", value, 200)), [])


def _throttle(_: Hardware, index: int, value: str) -> Change:
    names = set(value.split(","))
    if unknown := sorted(names - THROTTLE.keys()):
        raise LabError(f"--throttle {unknown[0]!r}: want some of {', '.join(THROTTLE)}")
    return Change(_keys(index, throttle=hex(sum(THROTTLE[name] for name in names))), [])


def _set(prefix: str, value: str) -> Change:
    key, equals, text = value.partition("=")
    if not equals or not _KEY.fullmatch(key) or re.search(r"[#\n=]", text):
        raise LabError(f"--set wants KEY=VALUE, as in nvml.state, not {value!r}")
    return Change({f"{prefix}{key}": text}, [])


def _reset(hardware: Hardware, index: int, _: str) -> Change:
    """Return the cures of `nvidia-smi --gpu-reset`; the driver logs nothing of it."""
    if hardware.key(index, "lost"):
        raise LabError(
            f"GPU {index} of {hardware.node} is off the bus: only a boot or --heal helps"
        )
    prefix = f"gpu{index}."
    keys = [key for key in hardware.nvml if key.startswith(prefix)]
    cured = [key for key in keys if _CURED_BY_RESET.fullmatch(key.removeprefix(prefix))]
    if hardware.key(index, "recovery_action") == _REBOOT_ONLY:
        cured.remove(f"{prefix}recovery_action")
    return Change(dict.fromkeys(cured), [])


def _heal(hardware: Hardware, index: int, _: str) -> Change:
    prefix = f"gpu{index}."
    return Change(dict.fromkeys(key for key in hardware.nvml if key.startswith(prefix)), [])


def _driver(_: Hardware, value: str) -> Change:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", value):
        raise LabError(f"--driver wants a version such as 570.133.20, not {value!r}")
    return Change({"driver": value}, [])


# `nvml_hang` comes with what to hang at: "sleep", or a path on a mount that is stale.
_OF_GPU: dict[str, Callable[[Hardware, int, str], Change]] = {
    "xid": _xid,
    "ecc": _ecc,
    "lost": _lost,
    "remap_failed": _remap_failed,
    "remap_pending": _remap_pending,
    "pcie_width": _pcie_width,
    "recovery_action": _recovery_action,
    "temp": _temp,
    "throttle": _throttle,
    "nvml_hang": lambda _, index, value: Change(_keys(index, hang=value), []),
    "set": lambda _, index, value: _set(f"gpu{index}.", value),
    "reset": _reset,
    "heal": _heal,
}
_OF_NODE: dict[str, Callable[[Hardware, str], Change]] = {
    "nvml_hang": lambda _, value: Change({"hang": value}, []),
    "driver": _driver,
    "set": lambda _, value: _set("", value),
    "heal": lambda hardware, _: Change(dict.fromkeys(hardware.nvml), []),
}
