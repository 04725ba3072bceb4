"""``python -m tests.exporter.zoo FILE [NAME …]``: whether files are the same bytes as those that FILE tells of.

Every model of the zoo and of ``examples`` is exported at opset 11, 17 and 20, unverified, in one process after another.
FILE, a JSON file, has the hash of each, or the first line of the error that refuses it; what it does not have yet is
added. A change of the exporter that is to leave files as they are is checked by a run before it and a run after it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import svexport
from svexport.cli._model import load_file
from svexport.errors import SvexportError
from tests.exporter.zoo import ZOO
from tests.exporter.zoo import test_zoo as _models  # noqa: F401 - which imports them all

OPSETS = (11, 17, 20)
EXAMPLES = ("deformable_detr", "detr3d", "multicamera", "stgcn", "yolox_stem")


def models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """A maker of each model and its arguments."""

    def example(name: str) -> tuple[nn.Module, Any]:
        module = load_file(Path(__file__).parents[3] / "examples" / f"{name}.py")
        model = module.model("small") if "small" in getattr(module, "CONFIGS", ()) else module.model()
        return model, model.example_inputs

    made: dict[str, Callable[[], tuple[nn.Module, Any]]] = {n: lambda n=n: example(n) for n in EXAMPLES}
    return made | {n: lambda e=e: (e.build(), e.inputs(2)) for n, e in ZOO.items()}


def written(make: Callable[[], tuple[nn.Module, Any]], opset: int) -> str:
    """The hash of a model's file, or why there is none."""
    torch.manual_seed(0)
    model, args = make()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            svexport.export(model.eval(), args, path, opset=opset, verify=False)
        except SvexportError as error:
            return str(error).splitlines()[0]
        return hashlib.sha256(path.read_bytes()).hexdigest()


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns 1 where a file is not the same."""
    parser = argparse.ArgumentParser("python -m tests.exporter.zoo", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("names", metavar="NAME", nargs="*", help="of models (default: all)")
    options = parser.parse_args(words)
    known = json.loads(options.file.read_text(encoding="utf-8")) if options.file.exists() else {}
    made = models()
    count = different = 0
    for name in options.names or made:
        for opset in OPSETS:
            key, found = f"{name} {opset}", written(made[name], opset)
            count += 1
            if known.setdefault(key, found) != found:
                different += 1
                print(f"{key}: was {known[key]}, is {found}", flush=True)
        options.file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"{count} files, {different} not the same")
    return int(different > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main())
