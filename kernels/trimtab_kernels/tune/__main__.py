"""`python -m trimtab_kernels.tune MODEL_FOLDER`.

Separate from measurement.py, because the measuring processes import that module and must not run the command again.
"""

import sys

from trimtab_kernels.tune.measurement import main

sys.exit(main())
