"""Collections while serving."""

import gc
from collections.abc import Iterator

import pytest
from trimtab_engine.ipc.garbage import keep_what_is_there


class Node:
    """One that may hold itself."""

    other: "Node | None" = None


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_no_longer_looks_at_what_start_up_made_but_at_what_serving_makes() -> None:
    kept = Node()
    keep_what_is_there()
    made = Node()
    seen = gc.get_objects()
    assert not any(one is kept for one in seen)
    assert any(one is made for one in seen)
    made.other = made
    del made, seen
    assert gc.collect() > 0
