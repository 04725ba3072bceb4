"""Constants of the planners' cost functions, by GPU: ``csrc/cuda/tuning/*.json``, compiled as ``csrc/cuda/tuning.h``.

``python -m svexport.kernels.tuning`` writes the header. A table is
``{"gpu": name, "figures": {op: {figure: [numbers]}}}``. It applies to every device whose name begins with ``gpu``; the
table ``default`` applies to all others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "HEADER", "header", "tables"]

FOLDER = Path(__file__).parents[1] / "csrc" / "cuda" / "tuning"
HEADER = FOLDER.parent / "tuning.h"
_MOST = 8  # maximum numbers per figure


def tables() -> list[dict[str, Any]]:
    """The tables that are compiled in, with the default table first."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return sorted(found, key=lambda table: (table["gpu"] != "default", table["gpu"]))


def header() -> str:
    """The text of ``tuning.h``.

    Raises:
        ValueError: if a figure has more numbers than a row holds.
    """
    all_tables = tables()
    rows = []
    for i, table in enumerate(all_tables):
        for op, figures in table["figures"].items():
            for name, values in figures.items():
                if not 0 < len(values) <= _MOST:
                    raise ValueError(f"{table['gpu']}: {op}: {name} should be 1 to {_MOST} numbers, got {len(values)}")
                rows.append(f'    {{{i}, "{op}", "{name}", {{{", ".join(_literal(value) for value in values)}}}}},')
    return "\n".join([
        "// The tables of tuning/*.json. Written by `python -m svexport.kernels.tuning`.",
        "#pragma once",
        "",
        "namespace svexport {",
        "",
        f"constexpr int kTables = {len(all_tables)};",
        f"constexpr const char* kTunedGpus[kTables] = {{{', '.join(json.dumps(t['gpu']) for t in all_tables)}}};",
        "",
        "struct Tuned {",
        "  int table;",
        "  const char *op, *name;",
        f"  float values[{_MOST}];",
        "};",
        "",
        "constexpr Tuned kTuned[] = {",
        *rows,
        "};",
        "",
        "}  // namespace svexport",
        "",
    ])  # fmt: skip


def _literal(value: float) -> str:
    return f"{float(value)!r}f"


if __name__ == "__main__":
    HEADER.write_text(header())
