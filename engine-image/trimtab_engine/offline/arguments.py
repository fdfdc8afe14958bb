"""Keywords of the offline LLM class: the flags of `trimtab-engine serve`, written with underscores.

They use the same parser, so that values have the same meaning and validation.
"""

import argparse
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.engine import engine_config
from trimtab_engine.flags.local_model import local_model
from trimtab_engine.flags.parser import OneLineParser
from trimtab_engine.flags.serve import SERVER_GROUPS, add_serve_flags
from trimtab_engine.sources.fetch import Fetched

OFFLINE_LIMITS = {"cpu": (256, 4096), "cuda": (256, 8192), "large": (1024, 16384)}
"""Default max_num_seqs and max_num_batched_tokens by device class: larger than a server's, because latency does not
matter."""
ENGINE_FLAGS_AMONG_THEM = (
    "--disable-log-stats",
    "--max-logprobs",
    "--generation-config",
    "--override-generation-config",
)


class _KeywordParser(OneLineParser):
    """Parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(flags_to_keywords(message))


def flags_to_keywords(message: str) -> str:
    """Return the message with --some-flag written as some_flag."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda match: match.group(1).replace("-", "_"), message)


def parse_keywords(model: str, keywords: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the keywords like `trimtab-engine serve`. Raises ConfigError."""
    parser = _KeywordParser(prog="LLM")
    add_serve_flags(parser)
    written = [text for name, value in keywords.items() for text in _as_flag(parser, name, value)]
    return parser.parse_args([*written, "--", model])


def read_keywords(model: str, keywords: Mapping[str, Any]) -> tuple[EngineConfig, argparse.Namespace, Fetched | None]:
    """Return the engine's configuration for LLM(model, **keywords), the other parsed values, and the downloaded model,
    if any.
    """
    try:
        arguments, fetched = local_model(parse_keywords(model, keywords))
        return engine_config(arguments, limits=OFFLINE_LIMITS), arguments, fetched
    except ConfigError as error:
        raise type(error)(flags_to_keywords(str(error))) from None


def _as_flag(parser: OneLineParser, name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    known = parser.all_flags()
    if flag not in known:
        close = parser.nearest_flag(flag)
        hint = f"; did you mean {flags_to_keywords(close)}?" if close else ""
        raise ConfigError(f"unknown keyword {name}{hint}; LLM accepts the flags of `trimtab-engine serve`")
    if flag in _server_flags(parser):
        raise ConfigError(f"{name} is a server flag; LLM runs in this process without a server; remove it")
    if value is None:
        return []
    if isinstance(value, bool):
        without = "--no-" + flag.removeprefix("--")
        return [flag] if value else [without] if without in known else []
    if isinstance(value, str | int | float):
        return [f"{flag}={value}"]
    if isinstance(value, list | tuple):
        return [flag, *(json.dumps(each) if isinstance(each, dict) else str(each) for each in value)]
    return [f"{flag}={json.dumps(value, default=_to_plain)}"]


def _to_plain(value: object) -> object:
    """Return a configuration object, such as CompilationConfig, as a dict of its set fields."""
    if isinstance(value, msgspec.Struct):
        return {name: field for name, field in msgspec.to_builtins(value).items() if field is not None}
    return repr(value)


def _server_flags(parser: OneLineParser) -> set[str]:
    """Return the flags that only apply to a server, by their group of --help."""
    groups = [group for group in parser._action_groups if group.title in SERVER_GROUPS]
    flags = {flag for group in groups for action in group._group_actions for flag in action.option_strings}
    return flags.difference(ENGINE_FLAGS_AMONG_THEM)
