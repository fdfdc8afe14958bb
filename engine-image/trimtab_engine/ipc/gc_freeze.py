"""Exclusion of start-up objects from garbage collection.

Torch, Triton and a model are 200,000 objects, and collecting over all of them takes 0.1 s or more, during which no step
starts. Requests are few objects, and most are freed by reference counting.
"""

import gc


def freeze_startup_objects() -> None:
    """Exclude all current objects from garbage collection. For a process about to serve: cycles among them are never
    freed.
    """
    gc.collect()
    gc.freeze()
