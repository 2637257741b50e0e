"""A debugger in miniature: attaches to a process, and detaches when its stdin ends.

``python tracer.py PID``. It prints "attached"; like gdb at its prompt it reaps nothing meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import sys

ATTACH, DETACH = 16, 17
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

pid = int(sys.argv[1])
if _libc.ptrace(ATTACH, pid, None, None):
    sys.exit(os.strerror(ctypes.get_errno()))
print("attached", flush=True)
sys.stdin.read()
_libc.ptrace(DETACH, pid, None, None)
