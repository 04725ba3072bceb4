"""Writes the table of rules as Markdown for the docs: ``python -m svexport.advise.table``."""

from __future__ import annotations

from svexport.advise.functions import Reach
from svexport.advise.rules import RULES

__all__ = ["table"]


def table() -> str:
    """One line per rule: code, habit, where it is looked for, and whether it is fixed."""
    where = {Reach.FORWARD: "forward", Reach.TENSORS: "functions of tensors"}
    lines = ["| code | habit | looked for in | `--fix` |", "|---|---|---|---|"]
    lines += [f"| {r.code} | {r.name} | {where[r.reach]} | {r.note if r.fixes else 'no'} |" for r in RULES.values()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
