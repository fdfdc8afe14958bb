"""One thing that cannot be, where it stands and what to do about it: what every check of a resource yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValidationError:
    """`field` as a user writes it (`spec.parallelism.tensor`), and a sentence that goes on from there."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"
