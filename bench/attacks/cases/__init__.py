"""All attacks; each module of this package has those of a topic in its ``ATTACKS``."""

from __future__ import annotations

import importlib
import pkgutil

from bench.attacks.attack import Attack

ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__))
    for attack in importlib.import_module(f"{__name__}.{module}").ATTACKS
}
"""The attacks by name."""
