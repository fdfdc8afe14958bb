"""`trimtab-engine completion bash | zsh`: print a completion script."""

import argparse
from typing import Any

from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.completion import script, words_by_command
from trimtab_engine.flags.parser import OneLineParser

EXAMPLES = """examples:
  in this shell:             source <(trimtab-engine completion bash)
  in all future shells:      trimtab-engine completion bash >> ~/.bashrc"""


def add_to(commands: Any, whole: OneLineParser) -> None:
    """Add the command. `whole` is the program's parser, whose words are completed."""
    parser = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description="Print a script for shell completion of commands and flags.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "words"), help="shell: bash or zsh")
    parser.add_argument(
        "path", metavar="COMMAND", nargs="*", help="for SHELL words: the command whose words are listed"
    )
    parser.set_defaults(run=lambda arguments: run(arguments, whole))


def run(arguments: argparse.Namespace, whole: OneLineParser) -> int:
    words = words_by_command(whole)
    if arguments.shell != "words":
        print(script(words, arguments.shell))
        return 0
    known = words.get(tuple(arguments.path))
    if known is None:
        raise ConfigError(f"unknown command {' '.join(arguments.path)}; see trimtab-engine --help")
    print("\n".join(known))
    return 0
