"""`trimtab-engine` as installed, but with the stub core in the core's place. Arguments are the command line's."""

import sys
from pathlib import Path

from trimtab_engine.cli import main
from trimtab_engine.engine_client import started_core

started_core.CORE_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_core.py")))

if __name__ == "__main__":
    sys.exit(main())
