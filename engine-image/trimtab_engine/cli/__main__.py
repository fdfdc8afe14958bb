"""`python -m trimtab_engine.cli` is `trimtab-engine`."""

import sys

from trimtab_engine.cli import main

sys.exit(main())
