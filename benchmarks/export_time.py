"""``svexport.export(verify=False)`` beside ``torch.onnx.export`` on ST-GCN, and ``import svexport`` beside ``import
torch``.

torch's exporter has no einsum below opset 12, so both write opset 13.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import svexport
from benchmarks._measure import interleaved, write
from examples import stgcn

_IMPORT = """
import time
a = time.perf_counter(); import torch; b = time.perf_counter(); import svexport; c = time.perf_counter()
print(b - a, c - b)
"""


def main() -> None:
    warnings.simplefilter("ignore")
    model = stgcn.model().eval()
    args = model.example_inputs
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"

        def peer() -> None:
            with torch.no_grad():
                torch.onnx.export(model, args, str(path), opset_version=13, dynamo=False, input_names=["x"])

        timings = interleaved(
            {
                "torch.onnx.export": peer,
                "svexport.export plugins=True": lambda: svexport.export(model, args, path, opset=13, verify=False),
                "svexport.export plugins=False": lambda: svexport.export(
                    model, args, path, opset=13, plugins=False, verify=False
                ),
            },
            seconds=8,
        )
    base = timings["torch.onnx.export"]["median"]
    rows = [{"workload": "stgcn export", "name": n, **t, "ratio": t["median"] / base} for n, t in timings.items()]

    runs = []
    for _ in range(9):
        output = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True).stdout
        runs.append(tuple(map(float, output.split())))
    for index, name in enumerate(("import torch", "import svexport, after torch")):
        seconds = sorted(run[index] for run in runs)
        rows.append({"workload": "import", "name": name, "median": seconds[4], "min": seconds[0], "runs": 9})
    for row in rows:
        ratio = f"  {row['ratio']:.2f}x" if "ratio" in row else ""
        print(f"{row['workload']:>14}  {row['name']:<32} {row['median'] * 1e3:9.1f} ms{ratio}")
    print(write("export-time-cpu", rows))


if __name__ == "__main__":
    main()
