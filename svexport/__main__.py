"""``python -m svexport``: the command line."""

from svexport.cli import main

raise SystemExit(main())
