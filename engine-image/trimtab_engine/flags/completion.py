"""Shell completion: the words of each command, and a completion script for bash and zsh."""

import argparse
import shlex
from collections.abc import Mapping, Sequence

from trimtab_engine.flags.parser import OneLineParser, UnsupportedFlag

SCRIPT = """_trimtab_engine() {{
    local word path="" words=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path/$word" in
            {paths}) path="$path/$word" ;;
        esac
    done
    case "$path" in
{cases}
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


def script(words: Mapping[tuple[str, ...], Sequence[str]], shell: str) -> str:
    """Return the script for `source <(…)`. `shell` is bash or zsh; zsh loads the bash script."""
    paths = "|".join(shlex.quote("/" + "/".join(path)) for path in words if path)
    cases = "\n".join(
        f"        {shlex.quote(''.join(f'/{name}' for name in path))}) words={shlex.quote(' '.join(known))} ;;"
        for path, known in words.items()
    )
    return (ZSH_HEAD if shell == "zsh" else "") + SCRIPT.format(paths=paths, cases=cases)
