"""`trimtab-engine completion bash | zsh`: print a completion script."""

import argparse
from typing import Any

from trimtab_engine.flags.completion import script
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
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="shell: bash or zsh")
    parser.set_defaults(run=lambda arguments: run(arguments, whole))


def run(arguments: argparse.Namespace, whole: OneLineParser) -> int:
    print(script(whole, arguments.shell))
    return 0
