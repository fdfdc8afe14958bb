"""MODEL as a path: one that is elsewhere is fetched first, so all that is below the command line knows paths alone."""

import argparse
import logging
import time
from dataclasses import replace

from trimtab_engine.flags.engine import engine_config, named_model
from trimtab_engine.flags.sources import bring, model_elsewhere
from trimtab_engine.sources.fetch import Fetched, OnProgress
from trimtab_engine.sources.progress import Downloaded, Progress

SAY_SECONDS = 10.0  # between two lines of the log

logger = logging.getLogger("trimtab_engine.sources")


def is_elsewhere(arguments: argparse.Namespace) -> bool:
    """Whether MODEL has to be asked for elsewhere. Raises ConfigError or ModelError for what is no model's name."""
    return model_elsewhere(named_model(arguments), arguments) is not None


def local_model(
    arguments: argparse.Namespace, on_progress: OnProgress | None = None
) -> tuple[argparse.Namespace, Fetched | None]:
    """The arguments with a path for MODEL. What was fetched stays in the cache while it is open. Raises ConfigError or
    ModelError; what is wrong with other flags is said before anything is fetched."""
    model = model_elsewhere(named_model(arguments), arguments)
    if model is None:
        return arguments, None
    if arguments.block_size != "auto":  # which is chosen by the model itself
        engine_config(arguments)
    log = ProgressLog()
    begun = time.monotonic()
    own: Progress | None = None

    def tell(progress: Progress) -> None:
        nonlocal own
        if progress.total_bytes and not progress.elsewhere:
            own = progress
        log.note(progress, time.monotonic())
        if on_progress is not None:
            on_progress(progress)

    local, fetched = bring(model, arguments, tell)
    if own is not None:
        downloaded = Downloaded(own.done_bytes - own.begun_bytes, time.monotonic() - begun)
        fetched = replace(fetched, downloaded=downloaded)
        logger.info("%s", downloaded.sentence)
    logger.info("model %s is in %s", fetched.model, fetched.path)
    return local, fetched


class ProgressLog:
    """Told of every bit of progress, writes few lines."""

    def __init__(self) -> None:
        self._said = float("-inf")

    def note(self, progress: Progress, now: float) -> None:
        if now - self._said >= SAY_SECONDS and progress.total_bytes:
            self._said = now
            logger.info("%s", progress.sentence)
