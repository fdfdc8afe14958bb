"""What the command lines of e2e/cluster and hack/dev share: the parser, and exit codes for errors."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .errors import ClusterError, UsageError

UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
"""Errors of a folder to which nothing, or nothing more, can be written."""
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports a wrong command line in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog.split(' -')[0]} --help`")


def node_count(text: str) -> int:
    """Parse a number of nodes."""
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{count} is negative; set 0 or more nodes")
    return count


def run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command's action and return the exit code."""
    # dockerd, runc, debootstrap and iptables are in folders that not every PATH has.
    searched = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*searched, *(each for each in SYSTEM_FOLDERS if each not in searched)])
    try:
        arguments = parser.parse_args(words)
        return int(arguments.action(arguments))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is None:
            raise
        remedy = "free some space there, or set TRIMTAB_CACHE to a writable folder"
        print(f"error: {error.filename}: {error.strerror}; {remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; finished parts stay in the cache; `make cluster-down` stops what is running", file=sys.stderr
        )
        return 130
