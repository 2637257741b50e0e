"""Queries of one GPU over NVML: a value, a group of values, a field; and the meaning of errors.

Runs in the collector's own process. Every call may fail or never return: the name of each query is
written before the call, so that a hang names its place; a failure is kept under the query's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Say = Callable[[str, Any], None]

NOT_SUPPORTED = "NVML_ERROR_NOT_SUPPORTED"
# After these a device answers nothing more: only a reset or a reboot brings it back.
_GONE = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_GPU_NOT_FOUND")


class Gone(Exception):
    """The device does not answer any more; the text is the name of NVML's error."""


def error_name(nv: Any, err: Any) -> str:
    """NVML's own name of an error: "NVML_ERROR_TIMEOUT".

    A query that an older library of the driver does not know is "not supported".
    """
    value = getattr(err, "value", None)
    if value in (nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_FUNCTION_NOT_FOUND):
        return NOT_SUPPORTED
    return code_name(nv, value)


def code_name(nv: Any, value: Any) -> str:
    """The name of one of NVML's return codes."""
    if value == 0:
        return "NVML_SUCCESS"
    for name in dir(nv):
        if name.startswith("NVML_ERROR_") and getattr(nv, name) == value:
            return name
    return f"NVML_ERROR_{value}"


def pci_address(bus_id: Any) -> str:
    """NVML's "00000000:3B:00.0" as the kernel writes it, "0000:3b:00.0"."""
    text = (bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id).lower()
    domain, mark, rest = text.partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if mark else text


def field_value(value: Any) -> int | float:
    """The number in an nvmlFieldValue_t, by its type."""
    kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    kind = int(value.valueType)
    number: int | float = getattr(value.value, kinds[kind] if kind < len(kinds) else "ullVal")
    return number


class Asker:
    """One GPU: its handle, and what was learnt of it so far in ``device``."""

    def __init__(self, nv: Any, say: Say, index: int):
        self.nv = nv
        self.index = index
        self.device: dict[str, Any] = {"index": index, "errors": {}}
        self.handle: Any = None
        self._say = say

    def open(self) -> None:
        """Get the handle; raises Gone."""
        self.stage("handle")
        try:
            self.handle = self.nv.nvmlDeviceGetHandleByIndex(self.index)
        except self.nv.NVMLError as err:
            raise Gone(error_name(self.nv, err)) from None

    def stage(self, query: str) -> None:
        self._say("stage", f"gpu{self.index} {query}")

    def failed(self, err: Exception) -> str:
        """The error's name; raises Gone when the device is."""
        if isinstance(err, AttributeError):
            return NOT_SUPPORTED  # this pynvml is older than the query
        name = error_name(self.nv, err)
        if name in _GONE:
            raise Gone(name) from None
        return name

    def refused(self, query: str, err: Exception) -> None:
        self.device["errors"][query] = self.failed(err)

    def one(self, query: str, call: Callable[[], Any]) -> None:
        """Ask for one value and keep it, or its error, as ``query``."""
        self.stage(query)
        try:
            self.device[query] = call()
        except (self.nv.NVMLError, AttributeError) as err:
            self.refused(query, err)

    def group(self, query: str, parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Ask for several values and keep those that came; an error of one is "query.key"."""
        self.stage(query)
        values: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for key, call in parts.items():
            try:
                values[key] = call()
            except (self.nv.NVMLError, AttributeError) as err:
                errors[key] = self.failed(err)
        if values:
            self.device[query] = values
            for key, name in errors.items():
                self.device["errors"][f"{query}.{key}"] = name
        elif errors:
            real = [name for name in errors.values() if name != NOT_SUPPORTED]
            self.device["errors"][query] = real[0] if real else NOT_SUPPORTED
        return values

    def newest(self, newest: Callable[[Any], Any], older: Callable[[Any], Any]) -> Any:
        """The answer of the newest form of a call that the driver's library has."""
        try:
            return newest(self.handle)
        except self.nv.NVMLError as err:
            if err.value not in (
                self.nv.NVML_ERROR_FUNCTION_NOT_FOUND,
                self.nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            ):
                raise
            return older(self.handle)

    def fields(self, *wanted: int | tuple[int, int]) -> list[Any]:
        """Raw nvmlFieldValue_t of field ids, or of (field id, scope)."""
        return list(self.nv.nvmlDeviceGetFieldValues(self.handle, list(wanted)))

    def checked(self, value: Any) -> int | float:
        """The number of one raw field value; raises its NVMLError."""
        if value.nvmlReturn:
            raise self.nv.NVMLError(value.nvmlReturn)
        return field_value(value)

    def field(self, number: int) -> int | float:
        return self.checked(self.fields(number)[0])
