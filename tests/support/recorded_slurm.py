"""The door to Slurm, its commands answered from a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from places import TESTS

from robust_slurm.slurm import Completed, Slurm, SlurmError

DATA = TESTS / "data" / "slurm"
ENVIRON = {"PATH": "/usr/bin", "SLURM_CONF": "/c", "SLURM_JOB_ID": "9", "HOME": "/h"}


def said(name: str) -> Completed:
    return Completed(0, (DATA / name).read_text(), "")


def failed(message: str, code: int = 1) -> Completed:
    return Completed(code, "", message + "\n")


OK = Completed(0, "", "")


class Recorded:
    """A runner that answers from a table: the first entry whose words all stand in the command.

    A list of answers is used up one by one; its last one stays.
    """

    def __init__(self, table: Mapping[str, Completed | SlurmError | list[Completed]]) -> None:
        self.table = dict(table)
        self.calls: list[tuple[str, ...]] = []
        self.inputs: list[str | None] = []
        self.envs: list[Mapping[str, str]] = []

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        assert 0 < deadline_s <= 10
        self.calls.append(tuple(argv))
        self.inputs.append(input)
        self.envs.append(env)
        for words, answer in self.table.items():
            if all(word in argv for word in words.split()):
                if isinstance(answer, list):
                    answer = answer.pop(0) if len(answer) > 1 else answer[0]
                if isinstance(answer, SlurmError):
                    raise answer
                return answer
        raise AssertionError(f"not expected: {argv}")

    def orders(self) -> list[tuple[str, ...]]:
        return [call for call in self.calls if "show" not in call]


def door(
    table: Mapping[str, Completed | SlurmError | list[Completed]],
) -> tuple[Slurm, Recorded]:
    runner = Recorded(table)
    return Slurm(runner, environ=ENVIRON), runner


def job_text(nodes: str, state: str = "RUNNING") -> Completed:
    return Completed(
        0,
        f"JobId=5 JobName=x UserId=a(7) GroupId=a(7) MCS_label=N/A JobState={state} "
        f"NodeList={nodes} BatchHost=n1\n",
        "",
    )


def node_text(state: str, reason: str = "") -> Completed:
    signed = f" Reason={reason} [root@1795251695]" if reason else ""
    return Completed(0, f"NodeName=n1 State={state} Partitions=train{signed}\n", "")
