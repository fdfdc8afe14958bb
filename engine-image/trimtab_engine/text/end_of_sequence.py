"""End-of-sequence token of a tokenizer folder, without the tokenizer library: every rank of the engine needs it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def tokenizer_eos_id(path: str) -> int | None:
    """Return the ID of the tokenizer's `eos_token`, or None if the folder has none. Loading the tokenizer reports
    unreadable files.
    """
    folder = Path(path)
    configs = [_read(folder / name) for name in CONFIG_FILES]
    token = next((text for config in configs if (text := _text(config.get("eos_token")))), None)
    if token is None:
        return None
    for token_id, added in _mapping(configs[0].get("added_tokens_decoder")).items():
        if _text(added) == token and token_id.isdecimal():
            return int(token_id)
    tokenizer = _read(folder / TOKENIZER_FILE)
    added_tokens = tokenizer.get("added_tokens")
    for added in added_tokens if isinstance(added_tokens, list) else ():
        if _text(added) == token:
            return _token_id(added.get("id"))
    vocabulary = _mapping(_mapping(tokenizer.get("model")).get("vocab"))  # a list in Unigram models
    return _token_id(vocabulary.get(token))


def _token_id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(token: object) -> str | None:
    """Return the text of a token, which is a string or an object with its content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) and content else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(file.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}
