"""`trimtab-engine completion bash | zsh`: a script by which a shell completes commands and flags."""

import argparse
from typing import Any

from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.completion import script, words_by_command
from trimtab_engine.flags.parser import OneLineParser

EXAMPLES = """examples:
  in this shell:             source <(trimtab-engine completion bash)
  in every shell from now:   trimtab-engine completion bash >> ~/.bashrc"""


def add_to(commands: Any, whole: OneLineParser) -> None:
    """`whole` is the parser of the program, whose words are told."""
    parser = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands and flags",
        description="Print a script by which a shell completes commands and flags.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "words"), help="bash or zsh")
    parser.add_argument("path", metavar="COMMAND", nargs="*", help="of words: the command whose words are listed")
    parser.set_defaults(run=lambda arguments: run(arguments, whole))


def run(arguments: argparse.Namespace, whole: OneLineParser) -> int:
    words = words_by_command(whole)
    if arguments.shell != "words":
        print(script(words, arguments.shell))
        return 0
    known = words.get(tuple(arguments.path))
    if known is None:
        raise ConfigError(f"there is no command {' '.join(arguments.path)}")
    print("\n".join(known))
    return 0
