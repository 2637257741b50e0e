"""Two ends of a wire between stores, and a snapshot that one sends and the other takes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.transfer import sending
from robust_slurm.checkpoint.transfer.channel import BrokenError, Channel
from robust_slurm.checkpoint.transfer.incoming import Incoming
from robust_slurm.checkpoint.transfer.sending import AbandonedError, Offer
from robust_slurm.frames.wire import Codec

KEY = b"k" * 32


def pair(key: bytes = KEY, other: bytes = KEY, idle: float = 10.0) -> tuple[Channel, Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    return (
        Channel(client, Codec(key, server=False), idle=idle),
        Channel(server, Codec(other, server=True), idle=idle),
    )


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except (BrokenError, AbandonedError, OSError) as err:
            results.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def greeted(**options: Any) -> tuple[Channel, Channel]:
    a, b = pair(**options)
    thread, _ = in_thread(b.greet)
    a.greet()
    thread.join(10)
    return a, b


def offer_of(tmp_path: Path, size: int, name: str = "source") -> tuple[int, Offer, bytes]:
    data = os.urandom(size)
    (tmp_path / name).write_bytes(data)
    fd = os.open(tmp_path / name, os.O_RDONLY)
    return fd, Offer(3, 7, 4, (3,), 0, size, digest.take(fd, size)), data


def send(channel: Channel, fd: int, offer: Offer, **more: Any) -> None:
    channel.send(offer.message("offer"))
    sending.send(channel, fd, offer, channel.receive(), **more)


def take(channel: Channel, path: Path, incoming: Incoming | None = None) -> Incoming:
    offer = Offer.read(channel.receive())
    incoming = incoming or Incoming(path, offer, busy=lambda: channel.send({"op": "busy"}))
    incoming.receive(channel)
    channel.send({"op": "done"})
    return incoming
