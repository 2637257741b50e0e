"""Why a process waits in the kernel: for a file server, for a user's own doing, or in a driver.

By /proc/PID/wchan, and by a stack's lines "[<0>] nfs_wb_all+0x8d/0x120 [nfs]". Pure.

A user can make a killed process stay for ever: his FUSE daemon or his page-fault handler
(userfaultfd) never answers, and whoever waits for a lock that its client holds shows nothing of it.
So only a wait inside a driver of this node's own devices is the node's, and that only while nobody
waits for a file server or a page-fault handler: memory of such a file may be the driver's buffer.
"""

from __future__ import annotations

# Functions in which a process waits for a FUSE daemon or a handler of page faults: any user's.
_FUSE = ("fuse_", "__fuse_", "request_wait_answer")
_USERS = (*_FUSE, "handle_userfault", "userfaultfd_")
# … and for a file server.
_FILE_SERVER = (
    *("nfs", "rpc_", "xprt_", *_FUSE, "ceph"),
    *("lustre", "ll_", "ptlrpc", "cl_", "osc_", "ldlm_", "cxiWaitEvent"),
)
# Modules of clients whose functions have no common name: GPFS, BeeGFS, WekaFS, SMB, PanFS, AFS …
_CLIENTS = ("mmfs", "beegfs", "weka", "cifs", "panfs", "openafs", "kafs", "orangefs")
# Drivers of GPUs, network adapters and disks, by module, and by function where it is built in.
_DRIVERS = (
    *("nvidia", "gdrdrv", "amdgpu", "mlx4_", "mlx5_", "ib_uverbs", "irdma", "bnxt_", "efa", "hfi1"),
    *("cxi_", "mpt3sas", "megaraid_", "ahci"),
)
_DISKS = frozenset({"nvme"})  # on PCIe; nvme_core serves disks over a network as well
_FUNCTIONS = ("nvidia_", "nv_", "_nv0", "uvm_", "os_acquire_", "mlx4_", "mlx5_", "cxi_")


def waits_for_server(channel: str, stack: str) -> bool:
    frames = _frames(stack)
    if any(module.startswith(_CLIENTS) for _, module in frames):
        return True
    return any(name.startswith(_FILE_SERVER) for name in (channel, *(name for name, _ in frames)))


def waits_for_user(channel: str, stack: str = "") -> bool:
    """True for a wait whose end is up to a process of any user."""
    return any(name.startswith(_USERS) for name in (channel, *(n for n, _ in _frames(stack))))


def waits_for_others(channel: str, stack: str = "") -> bool:
    """True for a wait that is no device's of this node."""
    return waits_for_server(channel, stack) or waits_for_user(channel, stack)


def driver(channel: str, stack: str) -> str:
    """The driver of this node's devices in which it waits; "": none, or somebody else's wait."""
    if waits_for_others(channel, stack):
        return ""
    frames = _frames(stack)
    for _, module in frames:
        if module in _DISKS or module.startswith(_DRIVERS):
            return module
    names = (channel, *(name for name, _ in frames))
    return next((name for name in names if name.startswith(_FUNCTIONS)), "")


def _frames(stack: str) -> list[tuple[str, str]]:
    """Function and module ("": built in) of each line."""
    found = []
    for line in stack.splitlines():
        name, _, module = line.partition("] ")[2].partition(" [")
        found.append((name.partition("+")[0], module.rstrip("]")))
    return found
