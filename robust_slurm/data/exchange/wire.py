"""Messages between data processes: JSON with raw bytes behind it, in authenticated frames.

A message is one frame with a JSON object, whose ``body`` says how many bytes follow in frames of
their own. Nothing that comes is executed, and no size is believed before it is checked.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta, Ref, Sample
from robust_slurm.frames.wire import Codec, WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PIECE = 1 << 18  # bytes of a body in a frame
MOST_BODY = 1 << 28
MOST_REFS = 4096  # samples in a request
_RECEIVE = 1 << 18
_FIRST = 1 << 12  # until the other end has shown the key
_NEXT = struct.Struct("<8q")  # epoch, part, record, piece, tokens; position
_WHOLE = 1 << 62
_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9a-zA-Z]{1,9}\])?\Z")


class BrokenLine(Exception):
    """The connection ended, was silent for too long, or brought a malformed message."""


class CannotSend(Exception):
    """A sample has values that this wire has no form for."""


class FrameSocket:
    """One connection. One thread receives; any may send, and ``close``.

    ``silence``: seconds without one whole frame until it counts as broken. ``first``: the frame by
    which the peer has already proved that it has the key.
    """

    def __init__(
        self, sock: socket.socket, codec: Codec, *, silence: float, first: bytes | None = None
    ) -> None:
        self._sock = sock
        self._codec = codec
        self.silence = silence
        self._lock = threading.Lock()
        self._frames: list[bytes] = [] if first is None else [first]
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
        for option, seconds in ((socket.SO_RCVTIMEO, silence / 4), (socket.SO_SNDTIMEO, 10.0)):
            value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
            sock.setsockopt(socket.SOL_SOCKET, option, value)

    def greet(self) -> None:
        """Send the preface and wait for the other's. Raises BrokenLine."""
        self._write(self._codec.preface())
        until = time.monotonic() + self.silence
        while not self._codec.ready:
            self._more(until)

    def send(self, message: dict[str, Any], body: Sequence[bytes] = ()) -> None:
        """Send a message. BrokenLine; CannotSend, and nothing is sent, if it is too long."""
        size = sum(map(len, body))
        head = json.dumps({**message, "body": size}, separators=(",", ":")).encode()
        if size > MOST_BODY or len(head) > 4 * PIECE - 64:
            raise CannotSend(f"a message of {len(head)} + {size} bytes is too long")
        with self._lock:
            try:
                self._write(self._codec.seal(head))
                for piece in _pieces(body):
                    self._write(self._codec.seal(piece))
            except WireError as err:
                raise BrokenLine(str(err)) from None

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its body. Raises BrokenLine."""
        try:
            message = json.loads(self._frame())
        except (ValueError, RecursionError):
            message = None
        size = message.get("body") if isinstance(message, dict) else None
        if type(size) is not int or not 0 <= size <= MOST_BODY:
            raise BrokenLine("a message that is not understood")
        body = bytearray()
        while len(body) < size:
            piece = self._frame()
            if not piece or len(body) + len(piece) > size:
                raise BrokenLine("a body of another size than it was said")
            body += piece
        return message, bytes(body)

    def close(self) -> None:
        """End it; a thread that waits in it gets BrokenLine."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        """Give the descriptor back; only by the thread that receives."""
        self.close()
        with self._lock:
            self._sock.close()

    # -- inside

    def _frame(self) -> bytes:
        until = time.monotonic() + self.silence
        while not self._frames:
            self._more(until)
        return self._frames.pop(0)

    def _more(self, until: float) -> None:
        """Take what has come. BrokenLine: the connection ended, or no frame came ``until`` then."""
        try:
            data = self._sock.recv(_RECEIVE if self._codec.trusted else _FIRST)
        except (BlockingIOError, InterruptedError):
            data = None
        except OSError as err:
            raise BrokenLine(err.strerror or str(err)) from None
        if data == b"":
            raise BrokenLine("the peer closed the connection")
        try:
            self._frames += self._codec.feed(data or b"")
        except WireError as err:
            raise BrokenLine(str(err)) from None
        if not self._frames and time.monotonic() >= until:
            raise BrokenLine(f"no whole message for {self.silence:g} s")

    def _write(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as err:
            self.close()  # a part of a frame may be on its way
            raise BrokenLine(err.strerror or str(err)) from None


def _pieces(body: Sequence[bytes]) -> Iterator[bytes]:
    """Join small parts of a body and cut large ones, into frames of about PIECE bytes."""
    buffer = bytearray()
    for part in body:
        if len(buffer) + len(part) <= PIECE:
            buffer += part
            continue
        if buffer:
            yield bytes(buffer)
            buffer.clear()
        for at in range(0, len(part), PIECE):
            yield bytes(part[at : at + PIECE])
    if buffer:
        yield bytes(buffer)


# -- metadata


def pack_metas(given: Iterable[tuple[Meta, Position]]) -> bytes:
    """Return metadata and positions as bytes; the lane is known to both ends."""
    return b"".join(_NEXT.pack(*meta.ref[2:], meta.tokens, *position) for meta, position in given)


def unpack_metas(lane: tuple[str, int], body: bytes) -> list[tuple[Meta, Position]]:
    """Return what ``pack_metas`` was given. Raises BrokenLine."""
    if len(body) % _NEXT.size:
        raise BrokenLine("half an entry of metadata")
    return [
        (Meta(Ref(*lane, *row[:4]), row[4]), Position(*row[5:])) for row in _NEXT.iter_unpack(body)
    ]


def whole_numbers(value: object, count: int) -> list[int]:
    """Return a list of ``count`` whole numbers from 0 on. Raises BrokenLine."""
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(type(number) is int and 0 <= number < _WHOLE for number in value)
    ):
        raise BrokenLine("numbers that are not understood")
    return value


# -- samples


def pack_samples(samples: Iterable[Sample]) -> tuple[Any, list[bytes]]:
    """Return the samples' description for JSON, and their values' bytes. Raises CannotSend."""
    samples = list(samples)
    alike = _pack_alike(samples)
    if alike is not None:
        return alike
    body: list[bytes] = []
    try:
        described = [
            [[*sample.meta.ref[2:], sample.meta.tokens], _describe(sample.values, body)]
            for sample in samples
        ]
    except RecursionError:
        raise CannotSend("values within values within values") from None
    return described, body


def unpack_samples(lane: tuple[str, int], described: object, body: bytes) -> list[Sample]:
    """Return what ``pack_samples`` was given. Raises BrokenLine."""
    if isinstance(described, dict):
        return _unpack_alike(lane, described, body)
    source = _Bytes(body)
    samples = []
    try:
        for numbers, form in described if isinstance(described, list) else [()]:
            *ref, tokens = whole_numbers(numbers, 5)
            values = _restore(form, source)
            if not isinstance(values, dict):
                raise BrokenLine("a sample without values")
            samples.append(Sample(Meta(Ref(*lane, *ref), tokens), values))
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as err:
        raise BrokenLine(f"a sample that is not understood: {err}"[:200]) from None
    if source.at != len(body):
        raise BrokenLine("more bytes than the samples have")
    return samples


def _pack_alike(samples: Sequence[Sample]) -> tuple[Any, list[bytes]] | None:
    """Pack samples that all have one-dimensional arrays of the same names and types, as tokenized
    text has: in a quarter of the time. None: they are not alike."""
    names = list(samples[0].values) if samples else []
    forms = [(name, getattr(samples[0].values[name], "dtype", None)) for name in names]
    if not names or not all(
        type(name) is str and getattr(dtype, "kind", "") in tuple("biuf") for name, dtype in forms
    ):
        return None
    numbers: list[int] = []
    body: list[bytes] = [b""]
    for sample in samples:
        if list(sample.values) != names:
            return None
        numbers += sample.meta.ref[2:]
        numbers.append(sample.meta.tokens)
        for name, dtype in forms:
            value = sample.values[name]
            if type(value).__name__ != "ndarray" or value.dtype != dtype or value.ndim != 1:
                return None
            numbers.append(len(value))
            body.append(value.tobytes())
    body[0] = struct.pack(f"<{len(numbers)}q", *numbers)
    alike: Any = [[name, dtype.str] for name, dtype in forms if dtype is not None]
    return {"count": len(samples), "alike": alike}, body


def _unpack_alike(lane: tuple[str, int], described: dict[str, Any], body: bytes) -> list[Sample]:
    import numpy as np

    samples = []
    try:
        if not all(type(kind) is str and _DTYPE.match(kind) for _, kind in described["alike"]):
            raise BrokenLine("an array that is not understood")
        forms = [(str(name), np.dtype(kind)) for name, kind in described["alike"]]
        (count,) = whole_numbers([described["count"]], 1)
        width = 5 + len(forms)
        numbers = struct.unpack_from(f"<{count * width}q", body) if count < len(body) else ()
        if min(numbers, default=-1) < 0:
            raise BrokenLine("numbers that are not understood")
        at = 8 * count * width
        for begin in range(0, count * width, width):
            *ref, tokens = numbers[begin : begin + 5]
            values = {}
            for (name, dtype), length in zip(forms, numbers[begin + 5 : begin + width]):  # noqa: B905
                values[name] = np.frombuffer(body, dtype, length, at).copy()
                at += length * dtype.itemsize
            samples.append(Sample(Meta(Ref(*lane, *ref), tokens), values))
    except (LookupError, TypeError, ValueError, ArithmeticError, struct.error) as err:
        raise BrokenLine(f"a sample that is not understood: {err}"[:200]) from None
    if at != len(body):
        raise BrokenLine("more bytes than the samples have")
    return samples


class _Bytes:
    """The bytes of a body, taken one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.at = 0

    def take(self, count: object) -> bytes:
        if type(count) is not int or not 0 <= count <= len(self._body) - self.at:
            raise BrokenLine("fewer bytes than a sample says")
        self.at += count
        return self._body[self.at - count : self.at]


def _describe(value: Any, body: list[bytes]) -> list[Any]:
    """Describe a value so that ``_restore`` returns the same, of the same type."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return ["v", value]
    if kind in (bytes, str):
        data = value if kind is bytes else value.encode("utf-8", "surrogatepass")
        body.append(data)
        return ["b" if kind is bytes else "s", len(data)]
    if kind in (list, tuple):
        return ["l" if kind is list else "t", [_describe(each, body) for each in value]]
    if kind is dict and all(type(name) is str for name in value):
        return ["d", [[name, _describe(each, body)] for name, each in value.items()]]
    dtype: Any = getattr(value, "dtype", None)
    if kind.__module__ == "numpy" and getattr(dtype, "kind", "") in tuple("biufcSUmM"):
        data = value.tobytes()
        body.append(data)
        form = "a" if kind.__name__ == "ndarray" else "n"
        return [form, dtype.str, list(value.shape), len(data)]
    raise CannotSend(f"a value of type {kind.__module__}.{kind.__qualname__}")


def _restore(form: Any, source: _Bytes) -> Any:
    what, given = form[0], form[1]
    if what == "v" and (given is None or type(given) in (bool, int, float)):
        return given
    if what in ("b", "s"):
        data = source.take(given)
        return data if what == "b" else data.decode("utf-8", "surrogatepass")
    if what in ("l", "t"):
        items = [_restore(each, source) for each in given]
        return items if what == "l" else tuple(items)
    if what == "d":
        return {str(name): _restore(each, source) for name, each in given}
    if what in ("a", "n"):
        import numpy as np

        if type(given) is not str or not _DTYPE.match(given):
            raise BrokenLine("an array that is not understood")
        dtype, shape = np.dtype(given), tuple(whole_numbers(form[2], len(form[2])))
        array = np.frombuffer(bytearray(source.take(form[3])), dtype).reshape(shape)
        return array if what == "a" else array[()]
    raise BrokenLine("a value that is not understood")
