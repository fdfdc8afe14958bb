"""`python3 e2e/cluster …`: makes this folder a package, whatever the working directory, and hands over to cli.py."""

from __future__ import annotations

import sys
from pathlib import Path

OLDEST = (3, 11)

if __name__ == "__main__":
    if sys.version_info < OLDEST:
        sys.exit(
            f"error: Trimtab needs Python 3.11 or later, and this is {sys.version_info[0]}.{sys.version_info[1]}; "
            "name another: make PYTHON=python3.12 …"
        )
    # Python puts this very folder first on the path when it runs a folder; the package lies one above.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from cluster.cli import main

    sys.exit(main(sys.argv[1:]))
