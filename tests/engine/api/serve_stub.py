"""The installed `trimtab-engine` with the stub core instead of the real one. Arguments are those of the command
line.
"""

import sys
from pathlib import Path

from trimtab_engine.cli import main
from trimtab_engine.engine_client import started_core

started_core.CORE_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_core.py")))

if __name__ == "__main__":
    sys.exit(main())
