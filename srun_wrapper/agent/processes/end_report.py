"""Report the end of a slot's rank, with the facts that its node knows about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes.rank_facts import RankFacts
from srun_wrapper.command.torchrun import starts_ranks
from srun_wrapper.protocol.messages import Exited

NONE: tuple[str, ...] = ()
LIMIT = 0.15  # s for the facts; then the end is reported without them: it may be the first cause
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# The words of torchrun and shells for a SIGKILL that ended a process below them.
_KILLED = re.compile(r"SIGKILL|\bsignal 9\b|exitcode\s*: -9\b|\bKilled\b", re.IGNORECASE)


def error_file(run_dir: Path, local: int) -> Path:
    """Return the file into which torch writes the exception of a slot's rank."""
    return run_dir / f"error-{local}.json"


def error_env(env: Mapping[str, str], command: Sequence[str], file: Path) -> dict[str, str]:
    """Return the variable that names torch's error file; {} if torchrun or the user sets it."""
    return {} if ERROR_FILE in env or starts_ranks(command) else {ERROR_FILE: str(file)}


def killed(code: int, tail: str) -> bool:
    """Return whether SIGKILL may have ended a rank, or what it ran (pure).

    ``code``: as subprocess gives it, negative for a signal; ``tail``: of its output.
    """
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL) or _KILLED.search(tail) is not None


class EndReport:
    """Reports each end once. The loop reads one counter; a thread reads what may take time."""

    def __init__(self, loop: Loop, error_file: Path, emit: Callable[[Exited], None]) -> None:
        """``error_file``: where torch writes the rank's exception, unless the user said where."""
        self._loop = loop
        self._error_file = error_file
        self._emit = emit
        self._facts: RankFacts | None = None
        self._end: Callable[[tuple[str, ...]], Exited] | None = None  # that is not reported yet

    def begin(self, pid: int) -> None:
        """Note the node's state at the start of a rank."""
        self.drop()
        self._facts = facts = RankFacts(pid, self._error_file)
        self._loop.run_in_thread(facts.begin, lambda _none: None, None)

    def ended(self, end: Callable[[tuple[str, ...]], Exited], tail: str, code: int) -> None:
        """Report an end, given its facts; ``tail``: of its output; ``code``: 0 needs none."""
        self.flush()
        facts, self._facts = self._facts, None
        by_kill = killed(code, tail)
        # Not in the thread: where memory was short, that one was seen not to answer within LIMIT.
        kill = facts.oom_kill() if facts is not None and by_kill else NONE

        def ended(found: tuple[str, ...]) -> Exited:
            return end(kill + found)

        def tell(found: tuple[str, ...]) -> None:
            if self._end is ended:
                self._end = None
                self._emit(ended(found))

        self._end = ended
        if facts is None:
            tell(())
        elif code == 0:
            tell(())
            self._loop.run_in_thread(facts.close, lambda _none: None, None)
        else:
            self._loop.run_in_thread(lambda: facts.gather(tail, killed=by_kill), tell, NONE)
            self._loop.later(LIMIT, lambda: tell(()))

    def flush(self) -> None:
        """Report an end that waits for the facts of the thread, without them."""
        end, self._end = self._end, None
        if end is not None:
            self._emit(end(()))

    def drop(self) -> None:
        """Forget a rank that was ended by an order."""
        facts, self._facts = self._facts, None
        if facts is not None:
            self._loop.run_in_thread(facts.close, lambda _none: None, None)
