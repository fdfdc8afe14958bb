"""Logging set-up: one JSON object per line by default, with the same field names in all modules."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

QUIET = ("httpx", "httpcore", "kopf._core.reactor.running", "kopf.objects", "aiohttp.access")
KOPF_ATTRS = ("settings", "k8s_skip", "k8s_ref")  # objects that Kopf adds to log records; they cannot be serialized


def configure_logging(style: str, level: str) -> None:
    """Log to standard error. `style` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(
            JsonFormatter(
                "%(asctime)s %(levelname)s %(name)s %(message)s",
                rename_fields=names,
                reserved_attrs=[*RESERVED_ATTRS, *KOPF_ATTRS],
                json_default=str,
            )
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
