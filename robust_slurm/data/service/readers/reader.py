"""One reader process: it reads windows of lanes from the positions that it is asked for.

It keeps the lanes that it reads open. All else that it has comes with each request, and goes back
with the answer: the data process loses nothing with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.exchange.wire import CannotSend, pack_samples
from robust_slurm.data.helper import trim_heaps
from robust_slurm.data.lanes.budget import SLOW, ReadBudget, ReadClaim
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.lanes.tally import Tally
from robust_slurm.data.service import wire
from robust_slurm.data.sources import turn
from robust_slurm.frames.json_lines import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from robust_slurm.data.lanes.window import LaneWindow
    from robust_slurm.data.plan import Plan
    from robust_slurm.data.service.readers.places import SharedPlaces
    from robust_slurm.data.sources.base import BadRecord, Source, SourcePart

TRIM = 10.0  # s between two times that free memory is given back
AT_ONCE = 2  # windows that it reads: one while the other waits for its file
MOST_BODY = 1 << 28  # bytes of a window's values
MOST_TEXT = 1 << 16  # characters of an error: a line of some MiB ends the connection


class _Watched:
    """A source that notes which record comes next."""

    def __init__(self, source: Source, reach: Callable[[int, int], None]) -> None:
        self.options = source.options
        self.fingerprint = source.fingerprint
        self._source = source
        self._reach = reach

    def parts(self) -> list[SourcePart]:
        return self._source.parts()

    def read(
        self, part: int, start: int = 0
    ) -> Iterator[tuple[int, dict[str, Any] | BadRecord | None]]:
        self._reach(part, start)
        for index, values in self._source.read(part, start):
            self._reach(part, index + 1)
            yield index, values


class WindowReader:
    """Answers on ``line``. ``number``: which reader this is."""

    def __init__(
        self, plan: Plan, line: wire.LineSocket, places: SharedPlaces, number: int
    ) -> None:
        self._plan = plan
        self._counts = plan.lanes()
        self._numbers = {lane: at for at, lane in enumerate(lanes_of(plan))}
        self._line = line
        self._places = places
        self._sending = threading.Lock()
        self._keeping = threading.Lock()
        self._open: dict[int, tuple[SourceLane, Position]] = {}  # by user, and where it is
        self._reading: set[int] = set()  # users whose lane is to stay open when it has been read
        self._turns = ReadBudget()
        self._turns.readers = AT_ONCE
        places.decode(number, "")
        turn.watch(lambda place: places.decode(number, place))

    def serve(self) -> None:
        """Answer until the data process has gone."""
        trimmed = time.monotonic()
        while True:
            message, _ = self._line.receive(SLOW) or ({"op": ""}, [])
            self._turns.regrant()
            if time.monotonic() - trimmed > TRIM:
                trim_heaps()
                trimmed = time.monotonic()
            if not message["op"]:
                continue
            with self._keeping:
                if message["op"] == "leave":
                    self._open.pop(message["user"], None)
                    self._reading.discard(message["user"])
                    continue
                self._reading.add(message["user"])
            try:
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()
            except RuntimeError as error:
                why = f"{message['source']}: no thread to read it: {error}"
                self._fail(message, DataError(why), None)

    def _answer(self, message: dict[str, Any]) -> None:
        claim = ReadClaim(0)
        self._turns.ask(claim)
        claim.granted.wait()
        try:
            self._read(message)
        except OSError as error:  # no descriptor is left, or the data process has gone
            with contextlib.suppress(OSError):
                self._send({"op": "cannot", "id": message["id"], "why": str(error)})
        finally:
            self._turns.settle(claim, 0)

    def _read(self, message: dict[str, Any]) -> None:
        began = time.thread_time()
        user, at = message["user"], Position(*message["at"])
        lane, where = self._open.pop(user, (None, None))
        if lane is None:
            lane = self._lane(message["source"], message["lane"])
        lane.tally = Tally(lane.source.options)
        lane.tally.adopt(message["tally"])
        if where != at:
            lane.seek(at)
        try:
            window = lane.next_window()
            told, body = self._packed(message, lane, window, began)
        except CannotSend as error:
            self._keep(user, None)
            self._send({"op": "cannot", "id": message["id"], "why": str(error)})
            return
        except BaseException as error:  # noqa: BLE001 - it is raised in the data process
            self._keep(user, None)
            self._fail(message, error, lane)
            return
        self._keep(user, (lane, window.after))
        window.clear()  # the lane still has the list
        fd = os.memfd_create("robust-window", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.writelines(body)
            del body
            with self._sending:
                self._line.send_line(told, [fd])
        finally:
            os.close(fd)

    def _keep(self, user: int, lane: tuple[SourceLane, Position] | None) -> None:
        """Keep a lane open that has been read, unless its user has left it meanwhile."""
        with self._keeping:
            if lane is not None and user in self._reading:
                self._open[user] = lane
            self._reading.discard(user)

    def _packed(
        self,
        message: dict[str, Any],
        lane: SourceLane,
        window: LaneWindow,
        began: float,
    ) -> tuple[bytes, list[bytes]]:
        """Return a window as a message, and its values' bytes. Raises CannotSend."""
        given = list(window)
        samples, body = pack_samples(sample for sample, _ in given)
        told = encode(
            {
                "op": "window",
                "id": message["id"],
                "fds": 1,
                "samples": samples,
                "after": [position for _, position in given],
                "tally": lane.tally.state(),
                "busy": time.thread_time() - began,
                "worked": worked(),
            }
        )
        if sum(map(len, body)) > MOST_BODY or len(told) > wire.MOST:
            raise CannotSend("a window that is too large")
        return told, body

    def _fail(self, message: dict[str, Any], error: BaseException, lane: SourceLane | None) -> None:
        kind = next((each for each in (SourceStalled, DataError) if isinstance(error, each)), None)
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        why = str(error) if kind is not None else f"{type(error).__name__}: {error}"
        self._send(
            {
                "op": "failed",
                "id": message["id"],
                "kind": kind.__name__ if kind is not None else "",
                "why": why[:MOST_TEXT],
                "trace": "".join(lines)[-MOST_TEXT:],
                "where": lane.where if lane is not None else "",
                "tally": lane.tally.state() if lane is not None else message["tally"],
            }
        )

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._line.send(message)

    def _lane(self, name: str, number: int) -> SourceLane:
        source = self._plan.sources[name]
        at = self._numbers[name, number]
        watched = _Watched(source, lambda part, record: self._places.reach(at, part, record))
        window, seed = source.options.window, self._plan.seed
        return SourceLane(watched, name, number, self._counts[name], seed, window)


def lanes_of(plan: Plan) -> list[tuple[str, int]]:
    """Return all lanes of a plan, in the order of their numbers."""
    return [(name, lane) for name, count in plan.lanes().items() for lane in range(count)]


def worked() -> float:
    """Return the seconds for which this thread has had a processor, or waited for one."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return time.thread_time()
    return max(time.thread_time(), int(ran) / 1e9) + int(waited) / 1e9
