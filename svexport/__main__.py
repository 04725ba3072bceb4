"""The command line: ``svexport``, and ``python -m svexport``."""

import sys

__all__ = ["main"]


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    try:
        from svexport import cli

        return cli.main()
    except KeyboardInterrupt:  # at any time, while modules are imported too
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
