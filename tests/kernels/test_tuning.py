from __future__ import annotations

import json

import pytest

from svexport.kernels import tuning


def test_the_header_is_what_the_tables_say() -> None:
    assert tuning.HEADER.read_text() == tuning.header(), "run python -m svexport.kernels.tuning"


def test_the_table_of_any_gpu_is_the_first() -> None:
    assert tuning.tables()[0]["gpu"] == "default"


def test_too_many_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    table = {"gpu": "default", "figures": {"op": {"launch": [1] * 9}}}
    (tmp_path / "default.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="default: op: launch should be 1 to 8 numbers, got 9"):
        tuning.header()
