"""`trimtab-engine inspect MODEL`: the model facts of docs/reference/contract.md section 6, from headers only."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trimtab_engine.cli.facts_table import bytes_on_disk, facts_table
from trimtab_engine.errors import ConfigError, ModelError, TrimtabError
from trimtab_engine.flags.sources import add_asking_flags, fetch_options, model_elsewhere
from trimtab_engine.sources.name import RemoteModel
from trimtab_engine.sources.source import FetchOptions

MAX_OUTPUT_FILE_BYTES = 4096  # Kubernetes keeps no more of a container's termination message


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="print what a model is: layers, heads, sizes",
        description="Print what a model is from its headers, without loading it.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with safetensors, a .gguf file, hf://ORG/NAME[@REVISION] of the hub, s3://BUCKET/PREFIX, or "
        "oci://REGISTRY/REPOSITORY:TAG",
    )
    add_asking_flags(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument(
        "--output-file",
        type=Path,
        metavar="PATH",
        help=f"write the facts there too, as JSON on one line, or why there are none; {MAX_OUTPUT_FILE_BYTES} bytes "
        "at most, as in a container's termination message",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from trimtab_engine.models.facts import DTYPE_BYTES, model_facts
    from trimtab_engine.weights.open import model_path

    try:
        elsewhere = model_elsewhere(arguments.model, arguments)
        if elsewhere is None:
            facts, stored_bytes = model_facts(arguments.model), bytes_on_disk(model_path(arguments.model))
        else:
            facts, stored_bytes = _facts_from_elsewhere(elsewhere, fetch_options(arguments))
        if arguments.output_file is not None:
            write_bounded(arguments.output_file, compact(facts))
    except TrimtabError as error:
        if arguments.output_file is not None:
            write_bounded(arguments.output_file, f"trimtab-engine: {error}")
        raise
    if arguments.output == "json":
        print(json.dumps(facts, indent=2))
    else:
        types = _stored_types(arguments.model) if facts["format"] == "gguf" else ()
        print(facts_table(facts, DTYPE_BYTES.get(facts["dtype"], 4), stored_bytes, types))
    return 0


def _stored_types(model: str) -> tuple[str, ...]:
    from trimtab_engine.models.registry import open_model
    from trimtab_engine.weights.gguf_file import GgufSource

    source = open_model(model)
    return source.stored_types if isinstance(source, GgufSource) else ()


def _facts_from_elsewhere(model: RemoteModel, options: FetchOptions) -> tuple[dict[str, Any], int]:
    """The facts of a model that is elsewhere, and the bytes of its weights there, from its configuration and the list
    of its files: no weight is fetched. The facts name the pin that the revision means now."""
    from trimtab_engine.models.facts import model_facts
    from trimtab_engine.sources.fetch import describe

    with TemporaryDirectory() as folder:
        found = describe(model, options, Path(folder))
        if not found.is_safetensors:
            raise ModelError(
                f"{model}: is a GGUF file, which is read here; trimtab-engine fetch {model}, then inspect that"
            )
        facts = model_facts(str(found.folder), load_format="dummy")
    if not facts["supported"]:
        facts["weights_bytes"] = found.weights_bytes
    pinned = replace(model, revision=found.commit)
    known = {**facts, "model": str(pinned), "format": "safetensors", "revision": found.commit}
    return known, found.weights_bytes


def compact(facts: Mapping[str, Any]) -> str:
    """The facts on one line. Raises ConfigError when the file could not hold them: half a JSON object helps nobody."""
    line = json.dumps(facts, separators=(",", ":"))
    if len(line.encode()) > MAX_OUTPUT_FILE_BYTES:
        raise ConfigError(
            f"the facts of {facts['model']} take {len(line.encode())} bytes, more than {MAX_OUTPUT_FILE_BYTES}; "
            "a name in its config.json is too long: shorten it"
        )
    return line


def write_bounded(path: Path, text: str) -> None:
    """Write at most MAX_OUTPUT_FILE_BYTES. Raises ConfigError when the file cannot be written."""
    data = text.encode(errors="replace")[:MAX_OUTPUT_FILE_BYTES].decode(errors="ignore")
    try:
        path.write_text(data, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-file {path} cannot be written: {error.strerror}; name another file") from error
