"""The description of a lab: names, addresses and the text of its configuration files (pure)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lab.errors import LabError

ROOT = Path("/var/lib/robust-lab")  # not below /tmp: every node has a /tmp of its own
HEAD = "head"
USER = "trainer"
ACCOUNT = "lab"  # the user's, in a lab with accounting
UID = 20001
ROOTS = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}  # of an environment
SLURMCTLD_PORT = 6817
OWN_DIRS = {"/tmp": 0o1777, "/dev/shm": 0o1777, "/run": 0o755}  # of each node its own
NETMASK = "255.255.0.0"
KERNEL_MB = 576  # memory of a node that has a kernel of its own; only what it uses is taken
SCRATCH_TYPE = "fuse.labfs"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_MAX_NODES = 5000  # what the address plan below has room for
_NET_NODES = 250  # nodes whose addresses have the first three numbers in common
_SWITCH_NODES = 500  # above, the nodes have a router in place of a switch


class LabSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description from which a lab is built; written to `lab.json` in its directory."""

    name: str
    nodes: int = 4
    standby: int = 1
    gpus: int = 0
    cpus: int = 8
    scratch: bool = False
    accounting: bool = False
    kernel: bool = False  # every node has a kernel of its own (lab/kernel)
    router: bool = False  # in place of the switch, as in a large lab
    slurm_conf: dict[str, str] = {}
    switches: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    slurm: str = ""  # the release: "24.11"; "" is the host's, until the lab is brought up
    slurm_root: str = ""  # where its programs are, if they are not the host's

    @property
    def dir(self) -> Path:
        """The lab's directory, the same path on the host and in every node."""
        return ROOT / self.name

    @property
    def shared(self) -> Path:
        """The user's home: the lab's shared file system."""
        return self.dir / "shared"

    @property
    def node_dir(self) -> Path:
        """A mount point that holds a tmpfs of its own in every node (hardware, slurmd's spool)."""
        return self.dir / "node"

    @property
    def spool(self) -> Path:
        """SlurmdSpoolDir: another tmpfs of the node's own."""
        return self.node_dir / "spool"

    @property
    def scratch_dir(self) -> Path:
        """The mount point of a node's shared file system (with `scratch`), which may go stale."""
        return self.node_dir / "scratch"

    @property
    def disk_dir(self) -> Path:
        """A directory of each node's own that outlives its crashes."""
        return self.node_dir / "disk"

    def disk_of(self, node: str) -> Path:
        """Return the disk's directory on the host."""
        return self.dir / "disks" / node

    @property
    def loader_cache(self) -> Path:
        """The /etc/ld.so.cache of nodes with GPUs."""
        return self.dir / "etc" / "ld.so.cache"

    @property
    def munge_socket(self) -> Path:
        return self.dir / "munge" / "munge.socket"

    @property
    def control_socket(self) -> Path:
        return self.dir / "control.sock"

    @property
    def routed(self) -> bool:
        """Return whether the nodes have no switch (lab/keeper/network.py): they are too many."""
        return self.router or self.nodes + self.standby > _SWITCH_NODES

    @property
    def patience(self) -> float:
        """The factor by which this lab's starts and ends may take longer than a small lab's."""
        return (4.0 if self.kernel else 1.0) + (self.nodes + self.standby) / 200

    def log(self, name: str) -> Path:
        return self.dir / "log" / f"{name}.log"

    @property
    def train_names(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    @property
    def standby_names(self) -> list[str]:
        return [f"s{i}" for i in range(1, self.standby + 1)]

    @property
    def compute_names(self) -> list[str]:
        return self.train_names + self.standby_names

    @property
    def all_names(self) -> list[str]:
        return [HEAD, *self.compute_names]


def check_spec(spec: LabSpec) -> LabSpec:
    """Return `spec` if a lab can be built from it, else raise LabError."""
    check_name(spec.name)
    if not 1 <= spec.nodes <= _MAX_NODES:
        raise LabError(f"--nodes must be 1..{_MAX_NODES}, not {spec.nodes}")
    if not 0 <= spec.standby <= _MAX_NODES:
        raise LabError(f"--standby must be 0..{_MAX_NODES}, not {spec.standby}")
    if not 0 <= spec.gpus <= 64:
        raise LabError(f"--gpus must be 0..64, not {spec.gpus}")
    if spec.accounting and any(key.lower().startswith("accounting") for key in spec.slurm_conf):
        raise LabError("--accounting has its own AccountingStorage… settings; leave --conf's out")
    if not 1 <= spec.cpus <= 1024:
        raise LabError(f"--cpus must be 1..1024, not {spec.cpus}")
    return spec


def check_name(name: str) -> str:
    """Return `name` if it can name a lab (it becomes a directory), else raise LabError."""
    if not _NAME.fullmatch(name):
        raise LabError(f"lab name {name!r}: want 1-31 of a-z, 0-9 and '-', not starting with '-'")
    return name


def address(node: str) -> str:
    """The IPv4 address of a node; every lab has 10.77.0.0/16 to itself."""
    if node == HEAD:
        return "10.77.255.1"
    third, fourth = divmod(int(node[1:]) - 1, _NET_NODES)
    return f"10.77.{third + (128 if node[0] == 's' else 0)}.{fourth + 1}"


def mac(node: str) -> str:
    """A fixed hardware address: a node that comes back is found by its peers' old ARP entries."""
    return "02:77:" + ":".join(f"{int(part):02x}" for part in address(node).split("."))


def hosts_file(spec: LabSpec) -> str:
    lines = ["127.0.0.1 localhost"]
    lines += [f"{address(name)} {name}" for name in spec.all_names]
    return "\n".join(lines) + "\n"


def passwd_file(host_text: str, home: Path) -> str:
    """The host's /etc/passwd with the lab's user in it."""
    kept = [line for line in host_text.splitlines() if not line.startswith(f"{USER}:")]
    return "\n".join([*kept, f"{USER}:x:{UID}:{UID}:lab user:{home}:/bin/bash"]) + "\n"


def group_file(host_text: str) -> str:
    """The host's /etc/group with the lab user's group in it."""
    kept = [line for line in host_text.splitlines() if not line.startswith(f"{USER}:")]
    return "\n".join([*kept, f"{USER}:x:{UID}:"]) + "\n"


def fstab_file(host_text: str, spec: LabSpec) -> str:
    """The host's /etc/fstab with the nodes' scratch in it, as a file system of the network."""
    line = f"lab {spec.scratch_dir} {SCRATCH_TYPE} rw,_netdev 0 0"
    return "\n".join([*host_text.splitlines(), line]) + "\n"


def gres_conf(spec: LabSpec) -> str:
    """GRES by device files that are no GPUs: Slurm only wants them to exist."""
    if not spec.gpus:
        return ""
    return f"Name=gpu Type=h100 File={spec.dir}/dev/nvidia[0-{spec.gpus - 1}]\n"


def topology_conf(spec: LabSpec) -> str:
    """A leaf switch w1, w2 … for each list of nodes, all under w0."""
    leaves = [f"SwitchName=w{i} Nodes={nodes}" for i, nodes in enumerate(spec.switches, 1)]
    return "\n".join([*leaves, f"SwitchName=w0 Switches=w[1-{len(leaves)}]"]) + "\n"


_CGROUPS = """\
CgroupPlugin=cgroup/v2
CgroupMountpoint=/sys/fs/cgroup
IgnoreSystemd=yes
ConstrainRAMSpace=yes
ConstrainCores=no
ConstrainDevices=no
"""


def cgroup_conf(spec: LabSpec) -> str:
    """Slurm without cgroups: the host's would be changed by a slurmd of root's.

    22.05 has no plugin "disabled"; its cgroup/v1 is the one that starts with none in sight.
    A node with a kernel of its own has cgroups of its own.
    """
    if spec.kernel:
        return _CGROUPS + ("" if spec.slurm == "22.05" else "EnableControllers=yes\n")
    return f"CgroupPlugin={'cgroup/v1' if spec.slurm == '22.05' else 'disabled'}\n"


def slurm_conf(spec: LabSpec) -> str:
    """The text of slurm.conf; `spec.slurm_conf` replaces settings (key in any case) or adds some.

    An override of AuthInfo keeps the lab's munge socket; an empty value drops the setting.
    """
    settings = {
        "ClusterName": spec.name,
        "SlurmctldHost": f"{HEAD}({address(HEAD)})",
        "SlurmctldPort": str(SLURMCTLD_PORT),
        "SlurmdPort": "6818",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={spec.munge_socket}",
        "StateSaveLocation": f"{spec.dir}/spool",
        "SlurmctldPidFile": f"{spec.node_dir}/slurmctld.pid",
        "SlurmctldLogFile": str(spec.log("slurmctld")),
        "SlurmdSpoolDir": str(spec.spool),
        "SlurmdPidFile": f"{spec.node_dir}/slurmd.pid",
        "SlurmdLogFile": f"{spec.dir}/log/slurmd-%n.log",
        "SlurmdParameters": "config_overrides",  # more CPUs than this machine has
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        **_accounting(spec),
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "GresTypes": "gpu" if spec.gpus else "",
        "TopologyPlugin": "topology/tree" if spec.switches else "",
        **(_KERNEL_CONF if spec.kernel else {}),
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "TmpFS": "/tmp",
        "PrologFlags": "Alloc,Contain",
        "PropagateResourceLimits": "NONE",
        "JobRequeue": "1",
        # A node that was DOWN only because it did not answer is usable again when it answers;
        # what a person or a check set (DRAIN, DOWN with a reason) stays.
        "ReturnToService": "1",
        "SlurmdTimeout": "300",  # Slurm's default: it is what recovery is measured against
        "KillWait": "5",
        # Nodes that share a few cores answer in turn.
        "MessageTimeout": "60" if spec.routed else "20" if spec.kernel else "5",
        # Schedule at once: nobody wants to wait in a lab.
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,"
        "bf_interval=1",
    }
    _override(settings, spec)
    lines = [f"{key}={value}" for key, value in settings.items() if value]
    memory = KERNEL_MB - 64 if spec.kernel else 16000
    gres = f" Gres=gpu:h100:{spec.gpus}" if spec.gpus else ""
    lines += [
        f"NodeName={names} NodeAddr={addresses} CPUs={spec.cpus} Boards=1 SocketsPerBoard=1 "
        f"CoresPerSocket={spec.cpus} ThreadsPerCore=1 RealMemory={memory}{gres} State=UNKNOWN"
        for names, addresses in _node_ranges(spec)
    ]
    lines.append(_partition("train", spec.train_names, default=True))
    if spec.standby:
        lines.append(_partition("standby", spec.standby_names, default=False))
    return "\n".join(lines) + "\n"


_KERNEL_CONF = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/cgroup",
    "JobAcctGatherType": "jobacct_gather/cgroup",
    "SelectTypeParameters": "CR_Core_Memory",
}


def _accounting(spec: LabSpec) -> dict[str, str]:
    if not spec.accounting:
        return {"AccountingStorageType": "accounting_storage/none"}
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": HEAD,
        "AccountingStoragePass": str(spec.munge_socket),  # AuthInfo is not for slurmdbd
        "AccountingStorageEnforce": "associations,limits,qos",
    }


def _override(settings: dict[str, str], spec: LabSpec) -> None:
    known = {key.lower(): key for key in settings}
    for key, value in spec.slurm_conf.items():
        if key.lower() == "authinfo" and "socket=" not in value:
            value = f"socket={spec.munge_socket},{value}"
        settings[known.get(key.lower(), key)] = value


def _node_ranges(spec: LabSpec) -> list[tuple[str, str]]:
    """Names and addresses for the lines of the nodes: a line each, in a large lab one for 250.

    Every command and every daemon of Slurm reads all lines.
    """
    if not spec.routed:
        return [(name, address(name)) for name in spec.compute_names]
    found = []
    for names in (spec.train_names, spec.standby_names):
        for begin in range(0, len(names), _NET_NODES):
            part = names[begin : begin + _NET_NODES]
            net, _, first = address(part[0]).rpartition(".")
            found.append((name_range(part), f"{net}.[{first}-{int(first) + len(part) - 1}]"))
    return found


def name_range(names: Sequence[str]) -> str:
    """Names that are numbered through, as Slurm writes them: "n[1-250]"."""
    return f"{names[0][0]}[{names[0][1:]}-{names[-1][1:]}]" if len(names) > 1 else "".join(names)


def _partition(name: str, nodes: list[str], *, default: bool) -> str:
    listed = ",".join(nodes) if len(nodes) <= _NET_NODES else name_range(nodes)
    return (
        f"PartitionName={name} Nodes={listed} Default={'YES' if default else 'NO'} "
        "MaxTime=INFINITE State=UP"
    )


def root_env(spec: LabSpec) -> dict[str, str]:
    """Return ``user_env`` for a process of root's, without the virtual environment."""
    return user_env(spec, []) | ROOTS


def user_env(spec: LabSpec, bin_dirs: list[Path], extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The clean environment of a process that is started in a node by hand."""
    path = [str(d) for d in bin_dirs]
    path += [f"/usr/local/{d}" for d in ("sbin", "bin")] + ["/usr/sbin", "/usr/bin"]
    path += ["/sbin", "/bin"]
    base = {
        "PATH": ":".join(dict.fromkeys(path)),
        "HOME": str(spec.shared),
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "SLURM_CONF": f"{spec.dir}/etc/slurm.conf",
    }
    return base | dict(extra)
