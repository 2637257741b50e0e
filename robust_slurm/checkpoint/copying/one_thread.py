"""Have torch's operators use only the thread that calls them."""

from __future__ import annotations

import ctypes

import torch


def use_one_thread() -> None:
    """Limit torch's operators to one thread where this thread calls them.

    torch.set_num_threads would change MKL's number for all threads.
    """
    torch.get_num_threads()  # torch sets a thread's number the first time that it is needed
    openmp = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if openmp is not None:
        openmp(1)
