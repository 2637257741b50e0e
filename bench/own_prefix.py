"""This environment in place of an installation, for stubs of benchmarks."""

from __future__ import annotations

import sys
import sysconfig

from bench.common import REPOSITORY
from health.admin.render import Prefix


def own_prefix() -> Prefix:
    """Return the sources and this environment's packages; no editable install is taken by root."""
    return Prefix(sys.executable, (str(REPOSITORY), sysconfig.get_paths()["purelib"]))
