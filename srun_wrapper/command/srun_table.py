"""srun's options as data: name, whether it takes an argument, short letter.

Facts read on 2026-11-21 in Slurm's own option table (src/common/slurm_opt.c, the entries that
srun accepts) at the first and last tag of every release from 22.05.0 to 26.05.3; the names and
letters of 22.05 were compared with ``srun --help`` of 22.05.8. The union is safe to parse with:
no option changed its letter, and only ``pty`` (no argument in 22.05) and ``external-launcher``
(none in 23.11) changed from "none" to "optional", which never takes the next word.

Not in every release:

async from 26.05; autocomplete from 23.02; consolidate-segments from 25.11; container-id
from 23.02; container-type from 26.05; external-launcher from 23.11, takes no value there;
extra from 23.02; gid until early 23.02; ignore-signals from 26.05; mem-update from 26.05;
oom-kill-step from 24.11; parsable from 26.05; power until 23.11; pty takes no value in
22.05; resources from 25.11; segment from 24.05; spread-segments from 25.11; stepmgr from
24.05; treewidth from 23.11; tres-bind from 23.11; tres-per-task from 23.02; uid until
early 23.02; wait-for-children from 25.05.

The container options are those of the SPANK plugin pyxis (NVIDIA/pyxis args.c, 2025), which most
GPU clusters have; an srun without the plugin rejects them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Arg = Literal["none", "required", "optional"]

_NONE = """
    async consolidate-segments contiguous debugger-test disable-status exact help hold
    interactive label multi-prog no-allocate overcommit oversubscribe parsable preserve-env
    quiet quit-on-interrupt reboot spread-job spread-segments stepmgr test-only unbuffered
    usage use-min-nodes verbose version wait-for-children whole
"""

_REQUIRED = """
    accel-bind account acctg-freq autocomplete bb bbf bcast-exclude begin chdir cluster
    cluster-constraint clusters comment constraint container container-id container-type
    context core-spec cores-per-socket cpu-bind cpu-freq cpu_bind cpus-per-gpu cpus-per-task
    deadline delay-boot dependency distribution epilog error exclude export extra
    extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
    gres gres-flags het-group hint ignore-signals input job-name jobid licenses mail-type
    mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus mpi
    msg-timeout network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
    ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output pack-group partition
    power prefer priority profile prolog qos relative reservation resources segment signal
    slurmd-debug sockets-per-node switches task-epilog task-prolog tasks-per-node
    thread-spec threads threads-per-core time time-min tmp treewidth tres-bind tres-per-task
    uid wait wckey
"""

_OPTIONAL = """
    bcast compress exclusive external-launcher immediate kill-on-bad-exit nice no-kill
    oom-kill-step overlap propagate pty resv-ports send-libs x11
"""

_PYXIS_NONE = """
    container-mount-home no-container-mount-home container-remap-root
    no-container-remap-root container-entrypoint no-container-entrypoint
    container-entrypoint-log container-writable container-readonly
"""

_PYXIS_REQUIRED = """
    container-image container-mounts container-workdir container-name container-save
    container-env container-unshare
"""


def _table(none: str, required: str, optional: str = "") -> dict[str, Arg]:
    table: dict[str, Arg] = dict.fromkeys(none.split(), "none")
    table.update(dict.fromkeys(required.split(), "required"))
    table.update(dict.fromkeys(optional.split(), "optional"))
    return table


LONG: Mapping[str, Arg] = MappingProxyType(
    _table(_NONE, _REQUIRED, _OPTIONAL) | _table(_PYXIS_NONE, _PYXIS_REQUIRED)
)
"""Long option (without dashes) -> whether it takes an argument."""

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "A": "account",
        "B": "extra-node-info",
        "b": "begin",
        "C": "constraint",
        "c": "cpus-per-task",
        "D": "chdir",
        "d": "dependency",
        "E": "preserve-env",
        "e": "error",
        "F": "nodefile",
        "G": "gpus",
        "H": "hold",
        "h": "help",
        "I": "immediate",
        "i": "input",
        "J": "job-name",
        "K": "kill-on-bad-exit",
        "k": "no-kill",
        "L": "licenses",
        "l": "label",
        "M": "clusters",
        "m": "distribution",
        "N": "nodes",
        "n": "ntasks",
        "O": "overcommit",
        "o": "output",
        "p": "partition",
        "Q": "quiet",
        "q": "qos",
        "r": "relative",
        "S": "core-spec",
        "s": "oversubscribe",
        "T": "threads",
        "t": "time",
        "u": "unbuffered",
        "V": "version",
        "v": "verbose",
        "W": "wait",
        "w": "nodelist",
        "X": "disable-status",
        "x": "exclude",
        "Z": "no-allocate",
    }
)
"""Short letter -> long option."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "cluster": "clusters",
        "cpu_bind": "cpu-bind",
        "pack-group": "het-group",
        "tasks-per-node": "ntasks-per-node",
    }
)
"""Second spellings -> the name used everywhere here."""
