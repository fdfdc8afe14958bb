"""Errors of the operator. Each class corresponds to the party that must act; callers translate library errors."""

from __future__ import annotations


class TrimtabError(Exception):
    """Base class of all errors that the operator raises."""


class InvalidSpec(TrimtabError):
    """The spec is invalid and the user must change it. Each finding names the field and the remedy."""

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


class NotYet(TrimtabError):
    """A required object does not exist yet; retry later."""


class NameTaken(TrimtabError):
    """An object that the operator must create already exists with another owner; the user must remove one of them."""


class MisconfiguredOperator(TrimtabError):
    """The installation is wrong, such as a missing CRD, an unreachable API server or an invalid flag."""


class NotLeading(TrimtabError):
    """The Lease expired; another process leads and this one must not write."""


class Gone(TrimtabError):
    """The resource was deleted or replaced by another one of the same name; no action is needed."""
