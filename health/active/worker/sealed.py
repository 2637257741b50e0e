"""A store that only the nodes of one test can write to, over one that anybody may connect to.

torch's TCPStore knows no password: whoever reaches its port can set any key, and a value of the
wrong form aborts the process that reads it. Here names and values carry a MAC of the coordinator's
secret for this test, and a value that does not verify is treated as missing.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

_TAG = 32  # bytes of SHA-256
_POLL_S = 0.05  # between two looks at a value that somebody else has put there


class Sealed(Store):
    """``store`` with the names and values of this ``secret`` only. For set, get and wait."""

    def __init__(self, store: TCPStore, secret: bytes) -> None:
        super().__init__()
        self._store = store
        self._secret = secret
        self._timeout: timedelta = store.timeout  # type: ignore[attr-defined]

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._name(key), self._tag(key, data).hex() + data.hex())

    def get(self, key: str) -> bytes:
        """The value, once it is there. DistStoreError: not within the store's time-out."""
        return self._got(key, time.monotonic() + self._timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there. DistStoreError: not in time."""
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:
            self._got(key, until)

    def has_extended_api(self) -> bool:
        return False

    def hidden(self) -> Store:
        """The same store under a secret name, without MACs: for NCCL, whose threads must not wait
        for Python. Whoever lists the keys (torch 2.9) finds it."""
        return PrefixStore(self._name("hidden"), self._store)

    def _got(self, key: str, until: float) -> bytes:
        name = self._name(key)
        while True:
            left = max(0.001, until - time.monotonic())
            self._store.wait([name], timedelta(seconds=left))
            value = self._opened(key, self._store.get(name))
            if value is not None:
                return value
            if time.monotonic() + _POLL_S > until:
                raise DistStoreError(f"wait timeout: {key} was written by a stranger")
            time.sleep(_POLL_S)

    def _opened(self, key: str, raw: bytes) -> bytes | None:
        try:
            data = bytes.fromhex(raw.decode("ascii"))
        except ValueError:
            return None
        tag, value = data[:_TAG], data[_TAG:]
        return value if hmac.compare_digest(tag, self._tag(key, value)) else None

    def _name(self, key: str) -> str:
        return self._tag(key, b"name").hex()

    def _tag(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        text = len(name).to_bytes(4, "big") + name + value
        return hmac.new(self._secret, text, hashlib.sha256).digest()
