"""Find habits in a training repo's sources that cost at export or run time; nothing is executed.

Exit code 1 if there are findings. `# noqa: SVX101` at the end of a line excuses that line, `# svexport: noqa` the file.

examples:
  svexport advise src/ --fix
  svexport advise src/ --select SVX1 --ignore SVX104
  svexport advise --explain SVX201
"""

from __future__ import annotations

import argparse

from svexport.cli import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", help="Python files, and folders that hold them (default: .)"
    )
    parser.add_argument("--fix", action="store_true", help="write the better form where it certainly computes the same")
    for flag, meaning in (("--select", "only these rules"), ("--ignore", "not these rules")):
        parser.add_argument(
            flag,
            metavar="CODES",
            action="append",
            default=[],
            help=f"{meaning}: codes or their beginnings, separated by commas",
        )
    parser.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave out files and folders of this name or path",
    )
    parser.add_argument("--explain", metavar="CODE", help="what a rule is about, what it costs, and the better form")


def run(options: argparse.Namespace) -> Outcome:
    from svexport.advise import advise

    if options.explain is not None:
        return _explain(options.explain)
    report = advise(
        options.paths or ["."],
        select=_codes(options.select),
        ignore=_codes(options.ignore),
        exclude=options.exclude,
        fix=options.fix,
    )
    return Outcome(report.ok, report.to_dict(), report.lines())


def _codes(given: list[str]) -> list[str]:
    return [code for words in given for code in words.replace(",", " ").split()]


def _explain(code: str) -> Outcome:
    from svexport.advise import RULES
    from svexport.advise.advise import AdviseError

    rule = RULES.get(code.upper())
    if rule is None:
        raise AdviseError(f"expected the code of a rule, got {code!r}; there are {', '.join(RULES)}")
    data = {
        "code": rule.code,
        "name": rule.name,
        "why": rule.why,
        "before": rule.before,
        "after": rule.after,
        "fixes": rule.fixes,
        "note": rule.note,
    }
    indent = "\n    "
    fix = ("Fix: " if rule.fixes else "No fix: ") + rule.note
    shown = [
        f"{rule.code}: {rule.name}",
        "",
        rule.why,
        "",
        f"instead of:{indent}{indent.join(rule.before.splitlines())}",
        f"write:{indent}{indent.join(rule.after.splitlines())}",
        "",
        fix + ".",
    ]
    return Outcome(True, data, shown)
