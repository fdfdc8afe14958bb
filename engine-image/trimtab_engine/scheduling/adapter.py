"""A low-rank adapter as the scheduler sees it: who it is, and where the device keeps it. A value, without weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that is loaded. Two of the same content are the same to the prefix cache, whatever they are called."""

    name: str
    """By which requests ask for it."""
    slot: int
    """Its place in the device's memory, the same on every rank, until nobody uses it any more."""
    digest: bytes
    """SHA-256 of its files: what it adds to the model depends on nothing else."""
