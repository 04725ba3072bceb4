"""The command line: ``svexport``, and ``python -m svexport``."""

import gc
import sys

__all__ = ["main"]


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    gc.set_threshold(50_000)  # imports make hundreds of thousands of objects that stay, 700 between collections
    try:
        from svexport import cli

        return cli.main()
    except KeyboardInterrupt:  # at any time, while modules are imported too
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
