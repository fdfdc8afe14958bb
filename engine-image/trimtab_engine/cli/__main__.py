"""Entry point of `python -m trimtab_engine.cli`, the same as `trimtab-engine`."""

import sys

from trimtab_engine.cli import main

sys.exit(main())
