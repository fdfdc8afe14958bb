"""`python3 e2e/cluster ...`: makes this folder a package in any working directory and calls cli.py.

Old Pythons read this file too, down to 2.7: it uses only their syntax, so that they can print the error.
"""

import sys

OLDEST = (3, 11)

if __name__ == "__main__":
    if sys.version_info < OLDEST:
        this = ".".join(str(number) for number in sys.version_info[:2])
        wanted = "Trimtab needs Python 3.11 or later"
        sys.exit("error: " + wanted + ", and this is " + this + "; name another: make PYTHON=python3.12 ...")
    from pathlib import Path

    # Python puts this very folder first on the path when it runs a folder; the package is one level above.
    E2E = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(E2E), str(E2E.parent / "hack")]
    from cluster.cli import main

    sys.exit(main(sys.argv[1:]))
