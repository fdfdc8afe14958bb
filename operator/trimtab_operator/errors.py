"""The operator's errors. The name says who acts next; translation happens at the edge."""

from __future__ import annotations


class TrimtabError(Exception):
    """Anything the operator raises on purpose."""


class InvalidSpec(TrimtabError):
    """The user acts: the resource asks for something that cannot be. Each finding names the field and the way out."""

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


class NotYet(TrimtabError):
    """Time acts: what is needed does not exist yet."""


class NameTaken(TrimtabError):
    """The user acts: an object that the operator must create exists already and belongs to somebody else."""


class MisconfiguredOperator(TrimtabError):
    """Whoever installed the operator acts: a missing CRD, an unreachable API server, a flag that cannot be."""


class NotLeading(TrimtabError):
    """Another process acts: the Lease has ended, and nothing may be written any more."""


class Gone(TrimtabError):
    """Nobody acts: the resource was deleted, or another one has its name."""
