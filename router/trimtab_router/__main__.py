"""`python -m trimtab_router`."""

import sys

from trimtab_router.command import main

sys.exit(main())
