"""``codes``, what ``svexport advise`` reports of a text."""

from __future__ import annotations

from pathlib import Path

from svexport.advise import advise


def codes(text: str, folder: Path) -> list[str]:
    """The codes of the findings in a file with this text."""
    path = folder / "text.py"
    path.write_text(text)
    report = advise([path])
    assert not report.unread
    return [f.code for f in report.findings]
