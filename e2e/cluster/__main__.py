"""`python3 e2e/cluster ...`: makes this folder a package, whatever the working directory, and hands over to cli.py.

Pythons that are too old read this file too, down to 2.7: it is written in what they know, so that they can say so.
"""

import sys

OLDEST = (3, 11)

if __name__ == "__main__":
    if sys.version_info < OLDEST:
        this = ".".join(str(number) for number in sys.version_info[:2])
        wanted = "Trimtab needs Python 3.11 or later"
        sys.exit("error: " + wanted + ", and this is " + this + "; name another: make PYTHON=python3.12 ...")
    from pathlib import Path

    # Python puts this very folder first on the path when it runs a folder; the package lies one above.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from cluster.cli import main

    sys.exit(main(sys.argv[1:]))
