"""Shell completion: a script for bash and zsh with the words of each command and the values of each flag."""

import argparse
import shlex
from collections.abc import Iterable, Sequence

from trimtab_engine.flags.parser import OneLineParser, UnsupportedFlag

SCRIPT = """_trimtab_engine() {{
    local word path="" words="" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path/$word" in
            {paths}) path="$path/$word" ;;
        esac
    done
    case "$path" in
{cases}
    esac
    case "$path $previous" in
{values}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _trimtab_engine trimtab-engine"""
ZSH_HEAD = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def words_by_command(parser: OneLineParser, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """Return the subcommands and flags of a command (key `()`) and of all its subcommands."""
    own: list[str] = []
    below: dict[tuple[str, ...], list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                own.append(name)
                below |= words_by_command(child, (*path, name))
        elif not isinstance(action, UnsupportedFlag):
            own += [flag for flag in action.option_strings if flag.startswith("--")]
    return {path: own, **below}


def values_by_flag(parser: OneLineParser, path: tuple[str, ...] = ()) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Return the possible values of each flag that has such a list, by its command and name."""
    values: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                values |= values_by_flag(child, (*path, name))
        elif action.choices and not isinstance(action, UnsupportedFlag):
            values |= {(path, flag): [str(choice) for choice in action.choices] for flag in action.option_strings}
    return values


def script(parser: OneLineParser, shell: str) -> str:
    """Return the script for `source <(…)`. `shell` is bash or zsh; zsh loads the bash script."""
    words = words_by_command(parser)
    paths = "|".join(shlex.quote("/" + "/".join(path)) for path in words if path)
    cases = [(_place(path), known) for path, known in words.items()]
    values = [(f"{_place(path)} {flag}", known) for (path, flag), known in values_by_flag(parser).items()]
    text = SCRIPT.format(paths=paths, cases=_cases(cases), values=_cases(values))
    return (ZSH_HEAD if shell == "zsh" else "") + text


def _place(path: tuple[str, ...]) -> str:
    return "".join(f"/{name}" for name in path)


def _cases(cases: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return the branches of a `case` that set the words."""
    return "\n".join(f"        {shlex.quote(at)}) words={shlex.quote(' '.join(known))} ;;" for at, known in cases)
