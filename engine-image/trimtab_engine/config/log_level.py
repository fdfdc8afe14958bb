"""How much the engine's processes log: of their own lines only, as libraries have levels of their own. Live."""

import logging

from trimtab_engine.config.engine import LogLevel


def set_log_level(level: LogLevel) -> None:
    """In this process, from now on."""
    logging.getLogger("trimtab_engine").setLevel(level.upper())
