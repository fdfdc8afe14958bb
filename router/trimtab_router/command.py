"""Entry point `trimtab-router`. Installs handlers of SIGTERM and Ctrl-C before any large import."""

from __future__ import annotations

import os
import signal
import sys
import tempfile

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_USAGE = 2


def main() -> int:
    """Run the router until SIGTERM and return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from trimtab_router.flags import ConfigError, parse_arguments

    try:
        config = parse_arguments(sys.argv[1:])
    except ConfigError as error:
        print(f"trimtab-router: {error}", file=sys.stderr)
        return EXIT_USAGE
    if config.processes == 1:
        from trimtab_router.run import run_router

        return run_router(config)
    with tempfile.TemporaryDirectory(prefix="trimtab-router-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read when prometheus_client is imported
        from trimtab_router.run import run_router

        return run_router(config)
