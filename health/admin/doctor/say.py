"""The doctor's remarks as text for people and as JSON. Pure but for writing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO

from health.admin.doctor.site_rules import Remark

JSON_VERSION = 1
_WIDTH = 88
_WORD = {"fix": "FIX", "advice": "ADVICE"}


def as_json(remarks: Sequence[Remark], config: Mapping[str, str], out: IO[str]) -> None:
    json.dump(
        {
            "version": JSON_VERSION,
            "slurm": config.get("SLURM_VERSION", ""),
            "cluster": config.get("ClusterName", ""),
            "slurm_conf": config.get("SLURM_CONF", ""),
            "remarks": [remark._asdict() for remark in remarks],
        },
        out,
        indent=1,
    )
    out.write("\n")


def as_text(remarks: Sequence[Remark], config: Mapping[str, str], out: IO[str]) -> None:
    """Print the faults first, and below each remark the reason and the line to paste."""
    if config:
        out.write(_head(config))
    for level, word in _WORD.items():
        for remark in remarks:
            if remark.level != level:
                continue
            out.write(f"\n{word:<7}{remark.subject}\n")
            for line in textwrap.wrap(remark.what, _WIDTH, break_on_hyphens=False):
                out.write(f"       {line}\n")
            where = f"{remark.where}:"
            for line in remark.line.splitlines():
                out.write(f"       {where:<12} {line}\n")
                where = ""
    count = {level: sum(r.level == level for r in remarks) for level in ("fix", "advice", "ok")}
    out.write(f"\n{count['fix']} to fix, {count['advice']} advice, {count['ok']} in order\n")


def _head(config: Mapping[str, str]) -> str:
    """The heading: the cluster, its Slurm, and the host and path of its slurm.conf."""
    host = config.get("SlurmctldHost[0]", "").partition("(")[0]
    file = config.get("SLURM_CONF", "")
    fetched = "enable_configless" in config.get("SlurmctldParameters", "").lower()
    text = f"cluster {config.get('ClusterName')}, Slurm {config.get('SLURM_VERSION')}"
    if host and file:
        text += f"; slurm.conf is {host}:{file}"
        text += " (configless: the nodes fetch it)" if fetched else ", and its copies on the nodes"
    return f"{text}\n"
