"""Print a script that has the shell complete commands, options and files of svexport.

examples:
  source <(svexport completion bash)                    # in ~/.bashrc
  source <(svexport completion zsh)                     # in ~/.zshrc, after compinit
  svexport completion fish > ~/.config/fish/completions/svexport.fish
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from svexport.cli import Outcome

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> Outcome:
    script = _fish() if options.shell == "fish" else _bash(zsh=options.shell == "zsh")
    return Outcome(True, {"shell": options.shell, "script": script}, [script])


def _commands() -> Iterator[tuple[str, str, list[argparse.Action]]]:
    """The name, summary and arguments of every command."""
    from svexport.cli import parser

    choices = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {action.dest: action.help or "" for action in choices._choices_actions}
    for name, command in choices.choices.items():
        yield name, summaries[name], command._actions


def _bash(zsh: bool) -> str:
    """One script for bash and zsh (by ``bashcompinit``); anything but options and choices is completed as a file."""
    options, values = [], []
    for name, _, actions in _commands():
        flags = [flag for action in actions for flag in action.option_strings]
        words = [str(choice) for action in actions if not action.option_strings for choice in action.choices or ()]
        options.append(f"    {name}) words={shlex.quote(' '.join(words + flags))} ;;")
        for action in actions:
            if action.option_strings and action.choices:
                cases = "|".join(f"{name}:{flag}" for flag in action.option_strings)
                values.append(f"    {cases}) words={shlex.quote(' '.join(map(str, action.choices)))}; only=1 ;;")
    names = " ".join(name for name, _, _ in _commands())
    lines = [
        *(["autoload -Uz bashcompinit && bashcompinit"] if zsh else []),
        "_svexport() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local command="" words="" only="" word',
        '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        f'    case " {names} " in *" $word "*) command="$word"; break ;; esac',
        "  done",
        '  case "$command" in',
        f'    "") words={shlex.quote(f"{names} --help --version --json --verbose")}; only=1 ;;',
        *options,
        "  esac",
        '  case "$command:$previous" in',
        *values,
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '  if [ -z "$only" ] && [[ "$current" != -* ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi',
        "}",
        "complete -o filenames -F _svexport svexport",
    ]
    return "\n".join(lines)


def _fish() -> str:
    lines = []
    for name, summary, actions in _commands():
        lines.append(f"complete -c svexport -n __fish_use_subcommand -a {name} -d {shlex.quote(summary)}")
        inside = f"complete -c svexport -n '__fish_seen_subcommand_from {name}'"
        for action in actions:
            flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings]
            takes = " -r" if flags and action.nargs != 0 else ""
            choices = f" -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else ""
            if flags or choices:
                about = f" -d {shlex.quote(action.help)}" if action.help else ""
                lines.append(f"{inside} {' '.join(flags)}{takes}{choices}{about}")
    return "\n".join(lines)
