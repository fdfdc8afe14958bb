"""The keywords of the offline LLM class, which are the flags of `trimtab-engine serve` written with underscores.

They go through the same parser, so that a value means, is checked and is refused the same in both places.
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
"""max_num_seqs and max_num_batched_tokens by kind of device: larger than a server's, as nobody waits for a token."""
ENGINE_FLAGS_AMONG_THEM = ("--disable-log-stats", "--max-logprobs")


class _KeywordParser(OneLineParser):
    """Raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(in_keywords(message))


def in_keywords(message: str) -> str:
    """A message about --some-flag as one about some_flag."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda match: match.group(1).replace("-", "_"), message)


def parse_keywords(model: str, keywords: Mapping[str, Any]) -> argparse.Namespace:
    """The keywords as `trimtab-engine serve` would have read them. Raises ConfigError for what it would refuse."""
    parser = _KeywordParser(prog="LLM")
    add_serve_flags(parser)
    written = [text for name, value in keywords.items() for text in _as_flag(parser, name, value)]
    return parser.parse_args([*written, "--", model])


def read_keywords(model: str, keywords: Mapping[str, Any]) -> tuple[EngineConfig, argparse.Namespace, Fetched | None]:
    """The engine's configuration for LLM(model, **keywords), the other values that were read, and the model where it
    was fetched."""
    try:
        arguments, fetched = local_model(parse_keywords(model, keywords))
        return engine_config(arguments, limits=OFFLINE_LIMITS), arguments, fetched
    except ConfigError as error:
        raise type(error)(in_keywords(str(error))) from None


def _as_flag(parser: OneLineParser, name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    known = parser.all_flags()
    if flag not in known:
        close = parser.nearest_flag(flag)
        hint = f"; did you mean {in_keywords(close)}?" if close else ""
        raise ConfigError(
            f"LLM has no keyword {name}{hint}; its keywords are the flags that `trimtab-engine serve` lists"
        )
    if flag in _server_flags(parser):
        raise ConfigError(f"{name} belongs to a server; LLM runs in this process and listens nowhere: leave it out")
    if value is None:
        return []
    if isinstance(value, bool):
        without = "--no-" + flag.removeprefix("--")
        return [flag] if value else [without] if without in known else []
    if isinstance(value, str | int | float):
        return [f"{flag}={value}"]
    if isinstance(value, list | tuple):
        return [flag, *(json.dumps(each) if isinstance(each, dict) else str(each) for each in value)]
    return [f"{flag}={json.dumps(value, default=_plain)}"]


def _plain(value: object) -> object:
    """A configuration object, such as CompilationConfig, as the fields that it sets."""
    if isinstance(value, msgspec.Struct):
        return {name: field for name, field in msgspec.to_builtins(value).items() if field is not None}
    return repr(value)


def _server_flags(parser: OneLineParser) -> set[str]:
    """Flags that only make sense for a server, by the group of --help that they are in."""
    groups = [group for group in parser._action_groups if group.title in SERVER_GROUPS]
    flags = {flag for group in groups for action in group._group_actions for flag in action.option_strings}
    return flags.difference(ENGINE_FLAGS_AMONG_THEM)
