"""`python -m trimtab_kernels.tune MODEL_FOLDER`.

A file of its own, as the processes that measure import measurement.py and must not begin anew.
"""

import sys

from trimtab_kernels.tune.measurement import main

sys.exit(main())
