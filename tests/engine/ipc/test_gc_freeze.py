"""Collections while serving."""

import gc
from collections.abc import Iterator

import pytest
from trimtab_engine.ipc.gc_freeze import freeze_startup_objects


class Node:
    """An object that may reference itself."""

    other: "Node | None" = None


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_gc_skips_startup_objects_but_not_later_ones() -> None:
    kept = Node()
    freeze_startup_objects()
    made = Node()
    seen = gc.get_objects()
    assert not any(one is kept for one in seen)
    assert any(one is made for one in seen)
    made.other = made
    del made, seen
    assert gc.collect() > 0
