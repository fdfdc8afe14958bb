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
from trimtab_engine.flags.sources import add_remote_access_flags, fetch_options, requested_remote_model
from trimtab_engine.sources.name import RemoteModel
from trimtab_engine.sources.source import FetchOptions

MAX_OUTPUT_FILE_BYTES = 4096  # Kubernetes' limit of a container's termination message


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="print model facts: layers, heads, sizes",
        description="Print model facts from the headers, without loading the weights.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with safetensors, a .gguf file, hf://ORG/NAME[@REVISION] on the Hugging Face hub, "
        "s3://BUCKET/PREFIX, or oci://REGISTRY/REPOSITORY:TAG",
    )
    add_remote_access_flags(parser)
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="output format (default: table)"
    )
    parser.add_argument(
        "--output-file",
        type=Path,
        metavar="PATH",
        help=f"also write the facts (or the error) to this file as one line of JSON, at most {MAX_OUTPUT_FILE_BYTES} "
        "bytes, the limit of a container's termination message",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from trimtab_modelspec.facts import DTYPE_BYTES

    from trimtab_engine.models.facts import model_facts
    from trimtab_engine.weights.open import model_path

    try:
        elsewhere = requested_remote_model(arguments.model, arguments)
        if elsewhere is None:
            facts, stored_bytes = model_facts(arguments.model), bytes_on_disk(model_path(arguments.model))
        else:
            facts, stored_bytes = _remote_facts(elsewhere, fetch_options(arguments))
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


def _remote_facts(model: RemoteModel, options: FetchOptions) -> tuple[dict[str, Any], int]:
    """Return the facts of a remote model and the size of its weights in bytes.

    Reads only its configuration and file list, no weights. The facts include the revision's current pin.
    """
    from trimtab_engine.models.facts import model_facts
    from trimtab_engine.sources.fetch import describe

    with TemporaryDirectory() as folder:
        found = describe(model, options, Path(folder))
        if not found.is_safetensors:
            raise ModelError(
                f"{model}: remote GGUF files cannot be inspected; run trimtab-engine fetch {model}, then inspect the "
                f"local file"
            )
        facts = model_facts(str(found.folder), load_format="dummy")
    if not facts["supported"]:
        facts["weights_bytes"] = found.weights_bytes
    pinned = replace(model, revision=found.commit)
    known = {**facts, "model": str(pinned), "format": "safetensors", "revision": found.commit}
    return known, found.weights_bytes


def compact(facts: Mapping[str, Any]) -> str:
    """Return the facts as one line of JSON.

    Raises:
        ConfigError: The line exceeds MAX_OUTPUT_FILE_BYTES; truncated JSON would be useless.
    """
    line = json.dumps(facts, separators=(",", ":"))
    if len(line.encode()) > MAX_OUTPUT_FILE_BYTES:
        raise ConfigError(
            f"{facts['model']}: the facts have {len(line.encode())} bytes, more than {MAX_OUTPUT_FILE_BYTES}; "
            "shorten long names in its config.json"
        )
    return line


def write_bounded(path: Path, text: str) -> None:
    """Write at most MAX_OUTPUT_FILE_BYTES.

    Raises:
        ConfigError: The file cannot be written.
    """
    data = text.encode(errors="replace")[:MAX_OUTPUT_FILE_BYTES].decode(errors="ignore")
    try:
        path.write_text(data, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-file {path}: cannot write the file: {error.strerror}; use another file") from error
