"""Validation error of a resource, returned by every check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValidationError:
    """A field as written by the user (`spec.parallelism.tensor`), and a message with the problem and the remedy."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"
