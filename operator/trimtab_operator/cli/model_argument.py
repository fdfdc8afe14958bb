"""A model as the command lines take it: a folder with a config.json, such a file, or the facts that inspect printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from trimtab_operator.layout.facts import ModelFacts, facts_of_config

MAX_FACTS_BYTES = 1 << 20
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NAME_ALONE = re.compile(r"[A-Za-z0-9][\w.-]*(?<!\.json)(?<!\.gguf)")


def facts_of(model: str) -> ModelFacts:
    """The facts; which of the two forms it is the keys tell. `-` is standard input.

    Raises ValueError with one line: what is wrong, where, and what to give instead.
    """
    where, text = _read(model)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: is not JSON ({error}); give a config.json, or what `trimtab-engine inspect -o json` prints"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: holds no JSON object")
    try:
        return ModelFacts.parse(values) if "architecture" in values else facts_of_config(values, model)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('config.json: ')}") from error


def _read(model: str) -> tuple[str, str]:
    """The name of what was read, and its text."""
    if model == "-":
        return "standard input", sys.stdin.read(MAX_FACTS_BYTES)
    path = Path(model.removeprefix("file://"))
    try:
        if path.is_dir():
            path /= "config.json"
        is_large = path.stat().st_size > MAX_FACTS_BYTES
        text = "" if is_large else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        remedy = "give a folder with a config.json, or the facts that inspect prints"
        name = model.removeprefix("hf://")
        if HUB_NAME.fullmatch(name):
            remedy = (
                f"if that is a name on the Hugging Face hub: hf download {name} config.json --local-dir FOLDER, then "
                f"give FOLDER"
            )
        elif NAME_ALONE.fullmatch(model) and not path.exists():
            remedy = (
                f"{remedy}. A model of the Hugging Face hub is ORG/NAME: hf download ORG/{model} config.json "
                f"--local-dir FOLDER, then give FOLDER"
            )
        raise ValueError(f"{model}: cannot be read: {reason}; {remedy}") from error
    if is_large:
        raise ValueError(f"{path}: is too large for a config.json or facts; of a GGUF file give what `inspect` prints")
    return str(path), text
