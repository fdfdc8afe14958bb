"""MODEL as a local path: remote models are downloaded first, so that the rest of the engine only handles paths."""

import argparse
import logging
import time
from dataclasses import replace

from trimtab_engine.flags.engine import engine_config, named_model
from trimtab_engine.flags.sources import download_model, requested_remote_model
from trimtab_engine.sources.fetch import Fetched, OnProgress
from trimtab_engine.sources.progress import Downloaded, Progress

PROGRESS_LOG_INTERVAL_SECONDS = 10.0  # between two log lines

logger = logging.getLogger("trimtab_engine.sources")


def is_remote_model(arguments: argparse.Namespace) -> bool:
    """Return True if MODEL is a remote model.

    Raises:
        ConfigError, ModelError: MODEL is not a valid model name.
    """
    return requested_remote_model(named_model(arguments), arguments) is not None


def local_model(
    arguments: argparse.Namespace, on_progress: OnProgress | None = None
) -> tuple[argparse.Namespace, Fetched | None]:
    """Return the arguments with a local path as MODEL. The cached model is locked while the returned value is open.

    Other flags are validated before anything is downloaded.

    Raises:
        ConfigError, ModelError: A flag is invalid or the model cannot be downloaded.
    """
    model = requested_remote_model(named_model(arguments), arguments)
    if model is None:
        return arguments, None
    if arguments.block_size != "auto":  # auto derives the size from the model itself
        engine_config(arguments)
    log = ProgressLog()
    begun = time.monotonic()
    own: Progress | None = None

    def report_progress(progress: Progress) -> None:
        nonlocal own
        if progress.total_bytes and not progress.elsewhere:
            own = progress
        log.update(progress, time.monotonic())
        if on_progress is not None:
            on_progress(progress)

    local, fetched = download_model(model, arguments, report_progress)
    if own is not None:
        downloaded = Downloaded(own.done_bytes - own.begun_bytes, time.monotonic() - begun)
        fetched = replace(fetched, downloaded=downloaded)
        logger.info("%s", downloaded.sentence)
    logger.info("model %s is in %s", fetched.model, fetched.path)
    return local, fetched


class ProgressLog:
    """Progress callback that logs at most one line per interval."""

    def __init__(self) -> None:
        self._said = float("-inf")

    def update(self, progress: Progress, now: float) -> None:
        if now - self._said >= PROGRESS_LOG_INTERVAL_SECONDS and progress.total_bytes:
            self._said = now
            logger.info("%s", progress.sentence)
