"""Reads damaged files: ``python -m tests.mutated [COUNT [FIRST]]``."""

from __future__ import annotations

import sys

from tests.mutated.run import main

if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
