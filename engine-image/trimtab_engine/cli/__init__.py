"""The command line `trimtab-engine`. Usage, model and machine errors print one line on stderr and exit with 2."""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from trimtab_engine.errors import ConfigError, TrimtabError
from trimtab_engine.flags.parser import OneLineParser
from trimtab_engine.ipc.process_exit import EXIT_INTERRUPTED

TRIMTAB_COMMANDS = ("plan", "simulate", "validate", "render")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code: 0 success, 1 runtime failure, 2 invalid request."""
    try:
        parser, given = _parser(), sys.argv[1:] if arguments is None else arguments
        _reject_trimtab_commands(given)
        parsed = parser.parse_args(_with_config_file(given, parser))
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"trimtab-engine: {error}", file=sys.stderr)
        return 2
    except TrimtabError as error:
        print(f"trimtab-engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        return 141


def _reject_trimtab_commands(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a command of the program `trimtab`."""
    if arguments[:1] and arguments[0] in TRIMTAB_COMMANDS:
        raise ConfigError(f"{arguments[0]} is a command of trimtab; see trimtab {arguments[0]} --help")


def _with_config_file(arguments: Sequence[str], parser: OneLineParser) -> Sequence[str]:
    """Return the arguments with the flags of the `serve` config file, if there is one."""
    if arguments[:1] != ["serve"]:
        return arguments
    from trimtab_engine.flags.config_file import take_config_file

    return take_config_file(arguments, parser.command("serve"))


def _parser() -> OneLineParser:
    from trimtab_engine.cli import (
        autotune_command,
        bench_command,
        completion_command,
        fetch_command,
        inspect_command,
        serve_command,
    )

    parser = OneLineParser(
        prog="trimtab-engine",
        description="Serve a language model with an OpenAI-compatible API, and tune it while it serves.",
        epilog="Start with: trimtab-engine serve MODEL --device cpu",
    )
    parser.add_argument("--version", action="version", version=f"trimtab-engine {version('trimtab')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve_command.add_to(commands)
    fetch_command.add_to(commands)
    inspect_command.add_to(commands)
    bench_command.add_to(commands)
    autotune_command.add_to(commands)
    completion_command.add_to(commands, parser)
    return parser
