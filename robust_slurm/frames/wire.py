"""Authenticated frames between robust-srun and its shims: bytes in, bytes out, no sockets.

Both ends send a preface (magic, version, 16 random bytes) as soon as they are connected. The
session key is ``blake2b(server_nonce + client_nonce, key=step_key)``, so nothing recorded in one
connection can be replayed in another. Then come frames::

    u32 length | 16-byte blake2b MAC over (direction, counter, payload) | payload

A peer without the step's key cannot produce one valid frame; a wrong MAC, a wrong magic or a
frame above the limit raises WireError and the connection is dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

MAGIC = b"RBST"
VERSION = 1
NONCE = 16
MAC = 16
PREFACE = len(MAGIC) + 1 + NONCE
MAX_FRAME = 1 << 20
MAX_FIRST_FRAME = 1 << 16  # until the peer has proved that it knows the key
_HEAD = struct.Struct(">I")
_SEAL = struct.Struct(">BQ")


class WireError(Exception):
    """The peer is not one of ours, or speaks another version."""


class Codec:
    """One connection's framing, for either end. Feed it what the socket gives."""

    def __init__(self, key: bytes, *, server: bool) -> None:
        if len(key) < 16:
            raise ValueError("step key shorter than 16 bytes")
        self._key = key
        self._server = server
        self._nonce = secrets.token_bytes(NONCE)
        self._session = b""
        self._buffer = bytearray()
        self._sent = 0
        self._received = 0

    @property
    def ready(self) -> bool:
        """True once the peer's preface is in, so that ``seal`` may be used."""
        return bool(self._session)

    @property
    def trusted(self) -> bool:
        """True once the peer has sent a frame that proves it has the key."""
        return self._received > 0

    @property
    def wanted(self) -> int:
        """Number of bytes until the end of what is coming in: the preface, a frame's head or its
        payload. Who reads no more at a time leaves all that follows in the socket."""
        have = len(self._buffer)
        if not self._session:
            return PREFACE - have
        if have < _HEAD.size + MAC:
            return _HEAD.size + MAC - have
        (length,) = _HEAD.unpack_from(self._buffer)
        return int(_HEAD.size + MAC + length - have)

    def preface(self) -> bytes:
        return MAGIC + bytes([VERSION]) + self._nonce

    def _mac(self, from_server: bool, counter: int, payload: bytes | memoryview) -> bytes:
        mac = hashlib.blake2b(_SEAL.pack(from_server, counter), key=self._session, digest_size=MAC)
        mac.update(payload)
        return mac.digest()

    def seal(self, payload: bytes) -> bytes:
        """Frame one message. ValueError above MAX_FRAME bytes."""
        if not self._session:
            raise WireError("peer has not authenticated yet")
        if len(payload) > MAX_FRAME:
            raise ValueError(f"message of {len(payload)} bytes is over the limit of {MAX_FRAME}")
        mac = self._mac(self._server, self._sent, payload)
        self._sent += 1
        return _HEAD.pack(len(payload)) + mac + payload

    def feed(self, data: bytes) -> list[bytes]:
        """Take received bytes, return the complete and authentic messages in them."""
        self._buffer += data
        if not self._session and not self._take_preface():
            return []
        messages: list[bytes] = []
        at = 0
        size = len(self._buffer)
        while size - at >= _HEAD.size + MAC:
            (length,) = _HEAD.unpack_from(self._buffer, at)
            if length > (MAX_FRAME if self.trusted else MAX_FIRST_FRAME):
                raise WireError(f"frame of {length} bytes is over the limit")
            start = at + _HEAD.size + MAC
            if size - start < length:
                break
            payload = bytes(self._buffer[start : start + length])
            expected = self._mac(not self._server, self._received, payload)
            if not hmac.compare_digest(expected, bytes(self._buffer[start - MAC : start])):
                raise WireError("frame is not authentic (another step's key?)")
            self._received += 1
            messages.append(payload)
            at = start + length
        if at:
            del self._buffer[:at]
        return messages

    def _take_preface(self) -> bool:
        if len(self._buffer) < PREFACE:
            if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
                raise WireError("peer does not speak the robust-slurm protocol")
            return False
        magic, version = bytes(self._buffer[: len(MAGIC)]), self._buffer[len(MAGIC)]
        if magic != MAGIC:
            raise WireError("peer does not speak the robust-slurm protocol")
        if version != VERSION:
            raise WireError(f"peer speaks protocol version {version}, this is {VERSION}")
        theirs = bytes(self._buffer[len(MAGIC) + 1 : PREFACE])
        del self._buffer[:PREFACE]
        nonces = self._nonce + theirs if self._server else theirs + self._nonce
        self._session = hashlib.blake2b(nonces, key=self._key[:64], digest_size=32).digest()
        return True
