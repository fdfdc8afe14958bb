"""Choice of the GPUs per pod of a replica if the spec does not set them."""

from __future__ import annotations


def gpus_of_a_pod(tensor: int, pipeline: int, data: int, *, most: int, nodes: int | None = None) -> int | None:
    """Return the largest number of GPUs up to `most` that the replica's ranks fill evenly. None if there is none.

    A pod holds whole engines if there are several, and whole tensor groups if possible, so that all-reduces stay in a
    node. `nodes` is the number of nodes with `most` GPUs each, if known; all pods must fit on them.
    """
    world, engine = tensor * pipeline * data, tensor * pipeline
    for unit in (engine,) if data > 1 else (tensor, 1):
        for size in range(min(most, world) // unit * unit, 0, -unit):
            if world % size == 0 and (nodes is None or world // size <= nodes * (most // size)):
                return size
    return None
