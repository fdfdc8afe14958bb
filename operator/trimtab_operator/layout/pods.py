"""How many GPUs each pod of a replica gets, where that is ours to choose."""

from __future__ import annotations


def gpus_of_a_pod(tensor: int, pipeline: int, data: int, *, most: int, nodes: int | None = None) -> int | None:
    """The largest number up to `most` that the replica's ranks fill evenly: whole engines where there are several, and
    whole tensor groups where that is possible, so that their all-reduces stay in a node.

    `nodes`: how many with `most` GPUs each there are, when that is known; all pods must find room on them. None: there
    is no such number.
    """
    world, engine = tensor * pipeline * data, tensor * pipeline
    for unit in (engine,) if data > 1 else (tensor, 1):
        for size in range(min(most, world) // unit * unit, 0, -unit):
            if world % size == 0 and (nodes is None or world // size <= nodes * (most // size)):
                return size
    return None
