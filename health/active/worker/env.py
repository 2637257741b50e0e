"""The worker's settings from its environment, and the environment in which it imports torch."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from typing import NamedTuple

LIFE_S = 900.0
_SIOCGIFADDR = 0x8915

# Settings that must be equal on all nodes for equal bits; torch reads them when it is imported.
_SET = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MKL_CBWR": "AUTO",  # the same bits at any alignment
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning takes the core from who has the work
    # An operation that hangs is an answer of ours; torch would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # its errors are in the answers
}
# Settings that would change the bits, or the speeds that are compared.
_UNSET = (
    "ATEN_CPU_CAPABILITY", "CUDA_LAUNCH_BLOCKING", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA",
    "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NCCL_ALGO",
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
)  # fmt: skip


class WorkerSettings(NamedTuple):
    """The settings read from the environment."""

    host: str
    port: int
    key: bytes
    node: str
    local: int
    life: float


def take_environment() -> WorkerSettings:
    """Read the settings, and remove server and key from the environment. Raises ValueError."""
    server = os.environ.pop("ROBUST_TEST_SERVER", "")
    key = os.environ.pop("ROBUST_TEST_KEY", "")
    node = os.environ.get("ROBUST_TEST_NODE", "")
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("ROBUST_TEST_SERVER must be host:port")
    if not node:
        raise ValueError("ROBUST_TEST_NODE must name this node")
    try:
        secret = bytes.fromhex(key)
        local = int(os.environ.get("ROBUST_TEST_LOCAL", "0"))
        life = float(os.environ.get("ROBUST_TEST_LIFE", LIFE_S))
    except ValueError:
        secret, local, life = b"", 0, 0.0
    if len(secret) < 16 or life <= 0:  # without the text: it may be the key
        raise ValueError("ROBUST_TEST_KEY must be hex, _LOCAL a number, _LIFE seconds above 0")
    return WorkerSettings(host.strip("[]"), int(port), secret, node, local, life)


def prepare(host: str) -> None:
    """Prepare the environment in which torch is imported, and raise the limit of open files.

    The first node of a ring has a connection from every node and GPU.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ.update(_SET)
    # Gloo would ask for the address of the host's name, which may be another one or none. NCCL
    # looks at the interfaces itself, and there the fastest is not always the one of our server.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_of(address: str) -> str:
    """The network interface that has this address; empty if none has it as its first."""
    if ":" in address:
        return _interface_v6(address)
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[20:24] == wanted:
                return name
    return ""


def _interface_v6(address: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    return next((fields[-1] for fields in lines if fields[0] == wanted), "")
