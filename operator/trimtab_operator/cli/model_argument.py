"""MODEL argument of the commands: a folder with a config.json, a config.json, or the output of `inspect -o json`."""

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
    """Return the facts of a model. `-` is standard input. The keys of the JSON decide between config.json and facts.

    Raises:
        ValueError: The file cannot be read or parsed; the message is one line with a remedy.
    """
    where, text = _read(model)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: not JSON ({error}); pass a config.json or the output of `trimtab-engine inspect -o json`"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{where}: not a JSON object; pass a config.json or the output of `trimtab-engine inspect -o json`"
        )
    try:
        return ModelFacts.parse(values) if "architecture" in values else facts_of_config(values, model)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('config.json: ')}") from error


def _read(model: str) -> tuple[str, str]:
    """Return the name of the source and its text."""
    if model == "-":
        return "standard input", sys.stdin.read(MAX_FACTS_BYTES)
    path = Path(model.removeprefix("file://"))
    try:
        if path.is_dir():
            path /= "config.json"
        is_large = path.stat().st_size > MAX_FACTS_BYTES
        text = "" if is_large else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        remedy = "pass a folder with a config.json, or the output of `trimtab-engine inspect -o json`"
        name = model.removeprefix("hf://")
        if HUB_NAME.fullmatch(name):
            remedy = (
                f"for a model on the Hugging Face hub, run `hf download {name} config.json --local-dir FOLDER` and "
                f"pass FOLDER"
            )
        elif NAME_ALONE.fullmatch(model) and not path.exists():
            remedy = (
                f"{remedy}. Models on the Hugging Face hub are named ORG/NAME: run `hf download ORG/{model} "
                f"config.json --local-dir FOLDER` and pass FOLDER"
            )
        raise ValueError(f"{model}: cannot be read: {reason}; {remedy}") from error
    if is_large:
        raise ValueError(
            f"{path}: too large for a config.json or model facts (limit {MAX_FACTS_BYTES >> 10} KiB); for a GGUF file, "
            "pass the output of `trimtab-engine inspect -o json`"
        )
    return str(path), text
