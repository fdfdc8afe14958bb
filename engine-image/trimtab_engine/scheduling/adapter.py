"""Low-rank adapters as plain values for the scheduler: name, slot and content digest, without weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter. Adapters with equal content share prefix cache entries, independent of their names."""

    name: str
    """The name that requests use."""
    slot: int
    """Its slot in device memory, the same on every rank, until no request uses the adapter."""
    digest: bytes
    """SHA-256 of its files. Its effect on the model depends on nothing else."""
