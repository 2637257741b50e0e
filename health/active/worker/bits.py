"""Digests of results, and what may rightly change their bits. Imports torch."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from health.active.worker.device import WorkerDevice

_VECTORS = ("avx", "amx", "fma", "sse", "f16c")
_PIECE = 64 << 20  # bytes that are copied at a time


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the digest of their raw bytes, hexadecimal.

    The bytes are read by address: torch would need numpy to copy them."""
    made = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        here = tensor.detach().cpu().contiguous()
        total = here.numel() * here.element_size()
        for at in range(0, total, _PIECE):
            made.update(ctypes.string_at(here.data_ptr() + at, min(_PIECE, total - at)))
    return made.hexdigest()


def environment(device: WorkerDevice) -> tuple[str, ...]:
    """Parts of a digest's key: model, capability, torch's version, its libraries."""
    return device.model.replace("/", "-"), capability(device), torch.__version__, libraries()


def libraries() -> str:
    """A short hash of what torch was built with, and of libc: their code makes the bits."""
    parts = (torch.__config__.show(), str(torch.version.cuda), *platform.libc_ver())
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def capability(device: WorkerDevice) -> str:
    """The properties that decide which kernels run: the GPU's architecture and processors, or the
    CPU's kind.

    Libraries look at the CPU's family and model, not only at what instructions it has.
    """
    if device.index is not None:
        about = torch.cuda.get_device_properties(device.index)
        return f"sm{about.major}{about.minor}x{about.multi_processor_count}"
    return "-".join((platform.machine(), torch.backends.cpu.get_cpu_capability(), *cpu_kind()))


def cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Vendor, family, model, cache and vector instructions of the first CPU, as far as it says.

    A hypervisor may hide some of the cache and of the instructions, by which libraries choose.
    """
    wanted = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "cache size")
    text = cpuinfo.read_text(errors="replace").split("\n\n")[0]
    lines = (line.partition(":") for line in text.splitlines())
    known = {name.strip(): value.strip().replace("/", "-") for name, _, value in lines}
    flags = sorted(f for f in known.get("flags", "").split() if f.startswith(_VECTORS))
    hashed = [hashlib.blake2b(" ".join(flags).encode(), digest_size=4).hexdigest()] if flags else []
    return [known[name].replace(" ", "") for name in wanted if name in known] + hashed
