"""Runs NVIDIA's ONNX parser, compiled together with a host of ours (host.cpp) that replaces libnvinfer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import OPS, as_tuple
from svexport.tensorrt.library import Headers
from tests.tensorrt.parser import generate
from tests.tensorrt.parser.interpret import Unsupported, run

__all__ = ["VARIABLE", "Parsed", "Parser", "compile_library", "compile_parser", "configured", "difference", "outcome"]

VARIABLE = "SVEXPORT_ONNX_PARSER"
"""Names a folder with NvOnnxParser.h and the compiled parser (``*.a`` or ``*.o``), for the headers of TENSORRT_ROOT."""

SOURCES = Path(__file__).parent

# Plugins of TensorRT itself that the parser makes layers of, by name: the interface (3: IPluginV3) and the fields.
OWN_PLUGINS = {
    "EfficientNMS_ONNX_TRT": (2, ""),
    "InstanceNormalization_TRT": (2, "epsilon,scales,bias,relu,alpha"),
    "ModulatedDeformConv2d": (2, "stride,padding,dilation,group,deformable_group"),
    "ROIAlign_TRT": (
        3,
        "coordinate_transformation_mode,mode,output_height,output_width,sampling_ratio,spatial_scale",
    ),
    "ScatterElements": (2, "axis,reduction"),
}


def scatter_elements(x: Tensor, index: Tensor, updates: Tensor, axis: Sequence[float], reduction: str) -> Tensor:
    how = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction.rstrip("\0")]
    index = torch.where(index < 0, index + x.shape[int(axis[0])], index).long()
    return x.scatter_reduce(int(axis[0]), index, updates, how)


def instance_normalization(
    x: Tensor, epsilon: Sequence[float], scales: Sequence[float], bias: Sequence[float], **activation: Any
) -> Tensor:
    weight, shift = (torch.tensor(values, dtype=torch.float32) for values in (scales, bias))
    y = F.instance_norm(x.float(), weight=weight, bias=shift, eps=epsilon[0])
    return y.to(x.dtype)


OWN: Mapping[str, Callable[..., Tensor]] = {
    "InstanceNormalization_TRT": instance_normalization,
    "ScatterElements": scatter_elements,
}
"""Plugins of TensorRT itself, as they are documented."""


def compile_parser(headers: Headers, parser: Path, folder: Path, cuda: Path) -> Path:
    """Compiles the host with the parser's objects; the path of the program."""
    path = folder / "parser_host"
    if path.is_file():  # another process of this run has made it
        return path
    _compile(headers, parser, folder, cuda, path, ())
    # The library of TensorRT's own plugins, which the parser opens where it makes a layer of some of them.
    empty = folder / f"libnvinfer_vc_plugin.so.{headers.version[0]}"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", empty], check=True)
    return path


def compile_library(headers: Headers, parser: Path, folder: Path, cuda: Path) -> Path:
    """Compiles host and parser as the library that TensorRT's Python bindings of this version are linked to."""
    path = folder / f"libnvinfer.so.{headers.version[0]}"
    _compile(headers, parser, folder, cuda, path, ("-shared", "-fPIC", "-DHOST_LIBRARY"))
    for name in ("libnvonnxparser", "libnvinfer_plugin"):
        (folder / f"{name}.so.{headers.version[0]}").symlink_to(path)
    return path


def _compile(headers: Headers, parser: Path, folder: Path, cuda: Path, path: Path, flags: Sequence[str]) -> None:
    (folder / "generated.h").write_text(generate.header(headers.folder))
    objects = sorted([*parser.glob("*.a"), *parser.glob("*.o")])
    command = [
        *("g++", "-std=c++17", "-O1", "-DNDEBUG", "-Wno-deprecated-declarations", *flags, "-I", folder, "-I", parser),
        *("-I", SOURCES, "-isystem", headers.folder, "-isystem", cuda / "include", SOURCES / "host.cpp"),
        *("-Wl,--whole-archive", *objects, "-Wl,--no-whole-archive", "-lprotobuf", "-ldl", "-lpthread", "-o", path),
    ]
    subprocess.run(command, check=True)


@dataclass
class Parsed:
    """What the parser made of a file.

    Attributes:
        ok: whether it took it; None if it crashed.
        said: its errors.
        host: what the host of ours refuses, or does not know.
        asked: the plugins that it asked for: ``call`` (find or create), ``name``, ``namespace``, ``version``, ``ok``,
            ``fields``.
        record: the network, for :func:`tests.tensorrt.parser.interpret.run`.
    """

    ok: bool | None
    said: list[str]
    host: list[str]
    asked: list[Mapping[str, Any]]
    record: Mapping[str, Any] = field(repr=False)

    def run(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of the network, computed by torch.

        Raises:
            Unsupported: if a layer of it is not interpreted.
        """
        return run(self.record, feeds, self._plugin)

    def created(self) -> list[Mapping[str, Any]]:
        return [note for note in self.asked if note["call"] == "create"]

    def _plugin(self, made: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """A plugin as the operator of torch that it stands for, with the fields that the creator got."""
        note = self.asked[made]
        if note["name"] in OWN:
            return [OWN[note["name"]](*inputs, **{f["name"]: f["data"] for f in note["fields"]})]
        op = next((op for op in OPS.values() if op.node_type == note["name"]), None)
        if op is None:
            raise Unsupported(f"the plugin {note['name']}")
        fields = {f["name"]: f["data"] for f in note["fields"]}
        casts = {"int": lambda v: int(v[0]), "float": lambda v: float(v[0])}
        casts |= {"ints": lambda v: [int(i) for i in v], "floats": lambda v: [float(i) for i in v]}
        attributes = {a.name: casts[a.kind](fields[a.name]) for a in op.attributes}
        return as_tuple(op(*op.bind(inputs, attributes)))


class Parser:
    """The parser of one version of TensorRT."""

    def __init__(self, program: Path, version: tuple[int, int]) -> None:
        self.program, self.version = program, version

    def __str__(self) -> str:
        return "{}.{}".format(*self.version)

    def read(self, files: Sequence[Path], plugins: Path | None = None, network: bool = True) -> list[Parsed]:
        """What becomes of files.

        Args:
            plugins: a plugin library, or none.
            network: whether to record the networks, too.
        """
        command = [str(self.program), *(("--network", "--data") if network else ())]
        for name, (interface, fields) in OWN_PLUGINS.items():
            newer = interface == 3 and self.version >= (10, 1)
            command += ["--mock3" if newer else "--mock", f"{name}:{2 if newer else 1}::{fields}"]
        command += [] if plugins is None else ["--plugin", str(plugins)]
        listed = "\n".join(str(path) for path in files)
        libraries = {**os.environ, "LD_LIBRARY_PATH": str(self.program.parent)}
        done = subprocess.run([*command, "-"], input=listed, capture_output=True, text=True, check=True, env=libraries)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [line["file"] for line in lines] == [str(path) for path in files], done.stderr
        return [self._parsed(line) for line in lines]

    @staticmethod
    def _parsed(line: Mapping[str, Any]) -> Parsed:
        said = [f"{Path(e['file']).name}:{e['line']} {e['desc']}" for e in line.get("errors", ())]
        host = [*line.get("host", ()), *(f"the host has no {name}" for name in line.get("missing", ()))]
        return Parsed(line["ok"], said, host, line.get("plugins", []), line)


def difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """What is wrong with results, in words: they agree to 1e-4 of the largest number, or are equal if integers."""
    if len(results) != len(expected):
        return f"{len(results)} outputs for {len(expected)}"
    for result, wanted in zip(results, expected):
        if result.shape != wanted.shape:
            return f"an output of shape {list(result.shape)} for {list(wanted.shape)}"
        precise = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 1e-2
        a, b = result.double(), wanted.to(result.dtype).double()  # float64 is computed in float32
        finite = torch.isfinite(b)
        if not torch.equal(torch.isnan(a), torch.isnan(b)) or not torch.equal(
            a[~finite & ~b.isnan()], b[~finite & ~b.isnan()]
        ):
            return "numbers that are not finite differ"
        if finite.any():
            bound = precise * max(float(b[finite].abs().max()), 1.0)
            worst = float((a[finite] - b[finite]).abs().max())
            if not worst <= (bound if wanted.is_floating_point() else 0):
                return f"numbers differ by {worst:.3g}"
    return ""


def outcome(
    parsed: Parsed,
    feeds: Mapping[str, Tensor] | None,
    expected: Sequence[Tensor] | None,
    compare: Callable[[Sequence[Tensor], Sequence[Tensor]], str] = difference,
) -> tuple[str, str]:
    """What the parser made of a model, and why.

    ``refused``; ``right``: the network computes what is expected; ``other``: it does not, or has other inputs;
    ``taken``: it is not known what it computes.
    """
    if not parsed.ok or parsed.host:
        return "refused", "; ".join([*parsed.said, *parsed.host]) or "a crash"
    if feeds is None or expected is None:
        return "taken", "no data"
    try:
        results = parsed.run(feeds)
    except Unsupported as unsupported:
        return "taken", str(unsupported)
    except Exception as error:  # noqa: BLE001 - whatever a network that means something else runs into
        return "other", f"{type(error).__name__}: {error}"
    wrong = compare(results, expected)
    return ("other", wrong) if wrong else ("right", "")


def configured() -> Path | None:
    """The folder that the environment names."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
