"""One rank that only reads data: ``python -m bench.data.rank '{"side": "stateful", …}'``.

Does what lines on standard input tell it, and answers on standard output:
``open`` the loader and take a batch, ``take N``, ``train N SECONDS`` a step, ``pass`` through all
from the beginning, ``save FILE`` its state, ``again FILE SKIP``: a fork does what a restarted rank
does. One JSON line each.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.data.corpus import MARK, Corpus, tokenise, tokenise_outside


def opened(spec: dict[str, Any], corpus: Corpus) -> Any:
    """Return the side's loader; iterating it begins to read."""
    side, rows, workers = spec["side"], spec["rows"], spec["workers"]
    if "small" in spec:
        from bench.data import small_rows

        return small_rows.opened(spec)
    if side == "ray":
        from bench.data.ray_side import Documents

        return Documents(corpus, rows, workers)
    if side == "ours":
        from bench.data.ours import loader as ours

        return ours(corpus, spec)
    from bench.data.torch_side import loader

    return loader(
        side == "stateful",
        corpus,
        tokenise_outside if spec.get("outside") else tokenise,
        rank=spec["rank"],
        world=spec["world"],
        rows=rows,
        workers=workers,
    )


def main(text: str) -> None:
    """Serve until the end of standard input."""
    spec = json.loads(text)
    corpus = Corpus(Path(spec["root"]), spec["sources"], spec["files"], spec["documents"])
    if spec["side"] != "ray":  # a training has it anyway
        import torch

        torch.set_num_threads(1)
    if spec["side"] == "ours":
        import bench.data.ours
        import robust_slurm.data.loader
        import robust_slurm.data.service.either  # noqa: F401
    elif spec["side"] != "ray":
        import bench.data.torch_side  # noqa: F401
    say(ready=True)
    loader: Any = None
    batches: Any = None
    for line in sys.stdin:
        word, *arguments = line.split()
        began = time.perf_counter()
        if word == "open":
            loader = opened(spec, corpus)
            batches = iter(loader)
            say(**take(batches, 1), seconds=time.perf_counter() - began)
        elif word == "again":
            again(spec, corpus, Path(arguments[0]), int(arguments[1]))
        elif word == "take":
            say(**take(batches, int(arguments[0])), seconds=time.perf_counter() - began)
        elif word == "train":
            say(longest_s=train(batches, int(arguments[0]), float(arguments[1])))
        elif word == "pass":
            batches = None  # ends what it has begun
            began = time.perf_counter()
            say(**take(iter(loader), None), seconds=time.perf_counter() - began)
        elif word == "save":
            torch.save(loader.state_dict(), arguments[0])
            say(saved=True)


def again(spec: dict[str, Any], corpus: Corpus, state: Path, skip: int) -> None:
    """Be a rank that is killed three batches after its newest checkpoint, ``state``, which it
    resumes from if there is one: in a process of its own, which has all modules, and nothing open.
    ``skip``: batches that a loader without a state passes over."""
    import torch

    from bench.data.child import end

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        saved = torch.load(state, weights_only=True) if state.exists() and not skip else None
        began, used = time.perf_counter(), time.process_time()
        loader = opened(spec, corpus)
        if saved is not None:
            loader.load_state_dict(saved)
        batches = iter(loader)
        take(batches, skip)
        first = take(batches, 1)
        found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - used}
        take(batches, 3)
        if not skip:
            torch.save(loader.state_dict(), state)
        take(batches, 3)
        os.write(writing, json.dumps({**first, **found}).encode())
        signal.pause()
    os.close(writing)
    answer = os.read(reading, 4096)  # empty if it has failed
    os.close(reading)
    end(pid)
    say(**json.loads(answer or "{}"))


def train(batches: Iterator[Any], number: int, seconds: float) -> float:
    """Take batches, and be busy for some seconds after each; return the longest wait for one."""
    longest = 0.0
    for _ in range(number):
        began = time.perf_counter()
        next(batches)
        longest = max(longest, time.perf_counter() - began)
        time.sleep(seconds)
    return longest


def take(batches: Iterator[Any], number: int | None) -> dict[str, int]:
    """Take batches of any side (None: all). Returns the tokens in them that are no padding, and
    the documents that begin in them."""
    tokens = documents = 0
    for batch in itertools.islice(batches, number):
        tokens += int((batch["document_ids"] >= 0).sum())
        documents += int((batch["tokens"] >= MARK).sum())
    return {"tokens": tokens, "documents": documents}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
