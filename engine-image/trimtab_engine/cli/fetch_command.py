"""`trimtab-engine fetch MODEL`: download a remote model into the cache before it is served."""

import argparse
import sys
import time
from typing import Any

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.flags.sources import add_source_flags, fetch_options, requested_remote_model
from trimtab_engine.sources.fetch import fetch
from trimtab_engine.sources.progress import Progress
from trimtab_engine.weights.open import model_path, not_loaded_from

PROGRESS_LOG_INTERVAL_SECONDS = 10.0  # between two progress lines without a terminal


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "fetch",
        help="download a model from the Hugging Face hub, a bucket or a registry",
        description="Download MODEL into the cache and print its folder. Interrupted downloads resume.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="hf://ORG/NAME[@REVISION][/FILE.gguf], ORG/NAME, s3://BUCKET/PREFIX[/FILE.gguf] or "
        "oci://REGISTRY/REPOSITORY:TAG",
    )
    add_source_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    model = requested_remote_model(arguments.model, arguments)
    if model is None:
        raise ConfigError(_nothing_to_fetch(arguments.model))
    with_screen = sys.stderr.isatty()
    said = 0.0

    def print_progress(progress: Progress) -> None:
        nonlocal said
        if with_screen:
            print(f"\r\033[K{progress.sentence}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - said >= PROGRESS_LOG_INTERVAL_SECONDS:
            said = time.monotonic()
            print(progress.sentence, file=sys.stderr, flush=True)

    try:
        fetched = fetch(model, fetch_options(arguments), print_progress)
    finally:
        if with_screen:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(fetched.path)
    fetched.close()
    return 0


def _nothing_to_fetch(model: str) -> str:
    """Return the error text for a MODEL that cannot be fetched."""
    if "://" in model and not model.startswith("file:"):
        return not_loaded_from(model)
    try:
        there = model_path(model)
    except ModelError as error:
        forms = "hf://ORG/NAME, s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY:TAG"
        return f"fetch accepts only remote models: {forms}; {error}"
    return f"{there} is a local model; use trimtab-engine serve without fetching"
