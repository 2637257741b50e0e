"""The kernel of a node: user-mode Linux, a process below the node's first one.

The first process has a PID namespace of its own, so its death ends the kernel and all of its
guest processes. SIGKILL to the kernel alone would let the guest processes run on, on the host.
"""

import shutil
import sys
from pathlib import Path

from lab.errors import LabError
from lab.spec import KERNEL_MB, UID, LabSpec, mac

PROGRAM = "linux.uml"
REPOSITORY = Path(__file__).resolve().parents[2]

_CAPS = "dac_override,dac_read_search,net_raw,net_admin,chown,fowner"


def why_not() -> str:
    """Return why no node can have a kernel here, or ""."""
    if not shutil.which(PROGRAM) or not shutil.which("setpriv"):
        return f"{PROGRAM} is not installed; try: apt-get install user-mode-linux"
    return ""


def check(spec: LabSpec) -> None:
    """Raise LabError if a lab's nodes cannot have kernels of their own."""
    if why := why_not():
        raise LabError(why)
    if spec.gpus or spec.scratch or spec.routed:
        raise LabError("nodes with a kernel of their own have no GPUs, scratch or router")


def command(spec: LabSpec, node: str) -> list[str]:
    """Return the command that boots the node (in its namespaces, its eth0 up without an address).

    Files that a guest writes into a directory of the host belong to the user of the kernel's
    process: so that is the lab's user, with the few capabilities that a guest's root needs.
    """
    caps = ",".join(f"+{name}" for name in _CAPS.split(","))
    setpriv = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    setpriv += [f"--inh-caps={caps}", f"--ambient-caps={caps}"]
    setpriv += ["--securebits=+no_setuid_fixup"]  # without it access(2) forgets them
    kernel = [PROGRAM, "rootfstype=hostfs", "rootflags=/", "ro", f"mem={KERNEL_MB}M", "quiet"]
    kernel += ["con=null", "con0=fd:0,fd:1", f"uml_dir={spec.node_dir}/uml/", f"umid={node}"]
    kernel += [f"vec0:transport=raw,ifname=eth0,mac={mac(node)},gro=1"]
    kernel += [f"PYTHONPATH={REPOSITORY}", f"init={sys.executable}"]
    return [*setpriv, *kernel, "--", "-m", "lab.kernel.guest", spec.name, node]
