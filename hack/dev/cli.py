"""The command line of `python3 hack/dev`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from cluster.target import DEFAULT_NAME
from devtools import command_line
from devtools.command_line import Parser, node_count

from . import commands, set_up


def parser() -> Parser:
    top = Parser(prog="python3 hack/dev", description="Commands of the Makefile and of CI.")
    known = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, action: Callable[[argparse.Namespace], int], text: str) -> Parser:
        command = known.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(action=action)
        return command

    ready = add("set-up", commands.set_up_parts, "prepare the named parts, in parallel")
    ready.add_argument("--name", default=DEFAULT_NAME, help="the cluster's name (default: %(default)s)")
    ready.add_argument("--workers", type=node_count, default=0, metavar="N", help="worker nodes (default: 0)")
    ready.add_argument("--for", dest="command_of_make", default="", metavar="COMMAND", help="named in the first line")
    ready.add_argument("--then", default="", metavar="WHAT", help="what that command does after the set-up")
    ready.add_argument("--then-seconds", type=float, default=0.0, metavar="S", help="the expected duration of that")
    ready.add_argument("--dry-run", action="store_true", help="only print what would be done")
    ready.add_argument("parts", nargs="+", metavar="PART", choices=set_up.PARTS, help=", ".join(set_up.PARTS))
    timed = add("stage", commands.run_stage, "run a program and report how long it took")
    timed.add_argument("--about", type=float, required=True, metavar="S", help="the expected duration in seconds")
    timed.add_argument("title", metavar="NAME")
    timed.add_argument("words", nargs="+", metavar="COMMAND")
    add("took", commands.took, "report how long each stage of this make command took")
    add("leftovers", commands.show_leftovers, "list leftovers on this machine; exit code 1 if there are any")
    return top


def main(words: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    return command_line.run(parser(), words)
