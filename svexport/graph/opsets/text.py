"""Strings and files of images."""

from __future__ import annotations

from svexport.graph.opsets.rules import refused

__all__: list[str] = []

_STRINGS = "no older op makes strings of strings, takes them apart or reads them letter by letter"

refused("StringConcat StringSplit RegexFullMatch", 20, _STRINGS)
refused("StringNormalizer", 10, _STRINGS)
refused("ImageDecoder", 20, "no older op decodes files of images")
