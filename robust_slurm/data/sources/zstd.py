"""Zstandard streams that tell where they are cut off."""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK = 1 << 16  # compressed bytes at a time
WINDOW = 1 << 31  # bytes: files by zstd --long=31 as well


def zstandard(name: str) -> Any:
    """Return the module zstandard, or raise DataError about ``name``, which needs it."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{name}: zstandard is not installed: pip install zstandard") from None
    return zstandard


class ZstandardStream(io.RawIOBase):
    """The content of a file of Zstandard frames.

    zstandard's own stream_reader mistakes a frame that is cut off for the end of the file.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__()
        self._file = file
        self._reader = zstandard(name).ZstdDecompressor(max_window_size=WINDOW)
        self._frame: Any = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        while not self._content:
            done = self._frame is None or self._frame.eof
            data = (self._frame.unused_data if done and self._frame else b"") or self._file.read(
                CHUNK
            )
            if not data and done:
                return 0
            if not data:
                raise EOFError("the file ends in the middle of a Zstandard frame")
            if done:
                self._frame = self._reader.decompressobj()
            self._content = memoryview(self._frame.decompress(data))
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._content))
        view[:size] = self._content[:size]
        self._content = self._content[size:]
        return size
