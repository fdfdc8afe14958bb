"""`trimtab-engine fetch MODEL`: a model that is elsewhere into the cache, before anything serves it."""

import argparse
import sys
import time
from typing import Any

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.flags.sources import add_source_flags, fetch_options, model_elsewhere
from trimtab_engine.sources.fetch import fetch
from trimtab_engine.sources.progress import Progress
from trimtab_engine.weights.open import model_path, not_loaded_from

SAY_SECONDS = 10.0  # between two lines where nobody watches


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "fetch",
        help="download a model of the Hugging Face hub, a bucket or a registry",
        description="Download MODEL into the cache and print its folder. What was cut goes on where it was.",
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
    model = model_elsewhere(arguments.model, arguments)
    if model is None:
        raise ConfigError(_nothing_to_fetch(arguments.model))
    with_screen = sys.stderr.isatty()
    said = 0.0

    def say(progress: Progress) -> None:
        nonlocal said
        if with_screen:
            print(f"\r\033[K{progress.sentence}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            print(progress.sentence, file=sys.stderr, flush=True)

    try:
        fetched = fetch(model, fetch_options(arguments), say)
    finally:
        if with_screen:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(fetched.path)
    fetched.close()
    return 0


def _nothing_to_fetch(model: str) -> str:
    """Why MODEL is none that could be fetched, and what to do."""
    if "://" in model and not model.startswith("file:"):
        return not_loaded_from(model)
    try:
        there = model_path(model)
    except ModelError as error:
        forms = "hf://ORG/NAME, s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY:TAG"
        return f"fetch takes a model of the Hugging Face hub, of a bucket or of a registry, {forms}; {error}"
    return f"{there} is on this machine already: there is nothing to fetch; give it to trimtab-engine serve"
