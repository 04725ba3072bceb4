"""``python -m tests.sweep``: runs what ``results.jsonl`` lacks, and writes ``docs/opsets.md``."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.sweep import page
from tests.sweep.judge import EXPORTERS, OPSETS, Expected, Verdict, expected, judge, warm_up
from tests.sweep.samples import Case, cases, names

RESULTS = Path(__file__).with_name("results.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", default="", help="a regular expression of their names; default: all")
    parser.add_argument("--opsets", type=int, nargs="*", default=list(OPSETS))
    parser.add_argument("--exporters", nargs="*", default=list(EXPORTERS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; the next run goes on")
    parser.add_argument("--again", action="store_true", help="also what is there, for newer results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--part", default="0/1", help="i/n: every n-th function from the i-th on, for n processes")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    if not options.page:
        sweep(options)
    if options.results == RESULTS:
        page.write(page.read(RESULTS))


def sweep(options: argparse.Namespace) -> None:
    """Appends a line per function and exporter with a cell per opset."""
    done = {} if options.again else page.read(options.results)
    started = time.monotonic()
    warm_up()
    index, parts = map(int, options.part.split("/"))
    for name in names()[index::parts]:
        if not re.search(options.functions, name):
            continue
        wanted = [
            (exporter, opset)
            for exporter in options.exporters
            for opset in options.opsets
            if str(opset) not in done.get(name, {}).get(exporter, {})
        ]
        if not wanted or "skipped" in done.get(name, {}):
            continue
        if time.monotonic() - started > options.seconds:
            print("stopped; run it again to go on")
            return
        runs, skipped = [], "no sample"
        of = {"function": name, "torch": torch.__version__.partition("+")[0]}
        for case in cases(name):
            found = expected(case)
            if isinstance(found, str):
                skipped = found
                if found == "random":
                    runs.clear()
                    break
            elif found:
                runs.append((case, found))
        if not runs:
            _append(options.results, {**of, "skipped": skipped})
        for exporter, opset in wanted if runs else ():
            done.setdefault(name, {}).setdefault(exporter, {})[str(opset)] = verdict = _apart(runs, opset, exporter)
            _append(options.results, {**of, "exporter": exporter, "cells": {str(opset): verdict}})
        print(name, *(f"{e[0]}{o}:{page.cell(done[name][e][str(o)])}" for e, o in wanted if runs), flush=True)


def _apart(runs: Sequence[tuple[Case, list[Expected]]], opset: int, exporter: str) -> dict[str, Any]:
    """The verdict, of a process of its own: some files end that of ONNX Runtime."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(vars(judge(runs, opset, exporter)), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code or not text:
        return vars(Verdict(wrong=len(runs), reasons=[f"the process ended with {code}"]))
    return json.loads(text)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
