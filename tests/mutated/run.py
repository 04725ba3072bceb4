"""Reads each damaged file in a process of its own, which may crash."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutated import ACTIONS, bases, mutated, outcome

__all__ = ["main"]

SECONDS = 30
"""After which a file hangs."""

MEMORY = 8 * 2**30
"""Of address space that a process may take; ONNX Runtime and torch need some of it."""


def work(whole: list[bytes], folder: str, connection) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = Path(folder, "m.onnx")
    while (seed := connection.recv()) is not None:
        path.write_bytes(mutated(whole[seed % len(whole)], seed))
        for action in ACTIONS:
            connection.send(("begins", action))
            connection.send(("ends", outcome(action, path)))
        connection.send(("done", ""))


def main(count: int = 10_000, first: int = 0) -> int:
    context = multiprocessing.get_context("spawn")
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole = bases(Path(folder))
        process = connection = None
        for seed in range(first, first + count):
            if process is None:
                connection, other = context.Pipe()
                process = context.Process(target=work, args=(whole, folder, other), daemon=True)
                process.start()
                other.close()
            connection.send(seed)
            action = ""
            try:
                while True:
                    if not connection.poll(SECONDS + 60 * (not action)):
                        raise TimeoutError
                    kind, text = connection.recv()
                    if kind == "done":
                        break
                    if kind == "begins":
                        action = text
                    elif text:
                        found[f"{action}: {text.partition(' at ')[0]}"] += 1
                        print(f"{seed} {action}: {text}", flush=True)
            except (EOFError, TimeoutError, ConnectionResetError) as error:
                process.join(1)
                what = f"hangs for {SECONDS} s" if isinstance(error, TimeoutError) else f"dies: {process.exitcode}"
                found[f"{action}: {what}"] += 1
                print(f"{seed} {action}: {what}", flush=True)
                process.kill()
                process = None
        if process is not None:
            connection.send(None)
            process.join(5)
    print(f"{count} files x {len(ACTIONS)}:", dict(found) or "nothing but results and errors of svexport")
    return bool(found)
