"""Import a plan by its name, module:attribute, as other processes can do, too."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import DataError
from .plan import Plan


def plan_named(name: str) -> Plan:
    """Import and return a plan; a function of that name is called. Raises DataError, and what
    the module's own code raises."""
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise DataError(f"{name!r} does not name a plan; write it as module:plan")
    if module == "__main__":
        raise DataError(f"{name!r}: put the plan into a module of its own, which can be imported")
    found: Any = import_module(module)
    if not hasattr(found, attribute):
        raise DataError(f"{name!r}: {found.__file__} has no {attribute}")
    found = getattr(found, attribute)
    if callable(found) and not isinstance(found, Plan):
        found = found()
    if not isinstance(found, Plan):
        raise DataError(f"{name!r} is a {type(found).__name__}: not a data.Plan")
    return found
