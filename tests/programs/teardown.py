"""The end of a program that has trained with DistributedDataParallel over gloo.

Left to Python, about one in a hundred of them never ends (torch 2.13): whoever lets go of the last
reference to the process group, DDP's reducer, holds the GIL and waits for gloo's thread, and that
one waits for the GIL to let go of what it kept from the backward pass.
"""

import atexit
import os
import sys
import traceback
from typing import NoReturn


def leave() -> NoReturn:
    """End with 0, as Python ends, but take nothing apart."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def fail(error: BaseException) -> NoReturn:
    """End as by an exception that nobody catches, but take nothing apart."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
