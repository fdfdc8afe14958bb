"""Garbage collection while idle; old objects are not collected each time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
import virtual_time
from trimtab_operator.reconcile import gc_tuning


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, float]]]:
    """Return the collector calls with their times."""
    before, found = gc.get_threshold(), list[tuple[str, float]]()

    def noted(name: str) -> None:
        monkeypatch.setattr(gc, name, lambda: found.append((name, asyncio.get_running_loop().time())))

    for name in ("collect", "freeze", "unfreeze"):
        noted(name)
    yield found
    gc.set_threshold(*before)


async def collect_for(seconds: float, busy: tuple[float, float] = (0.0, 0.0)) -> None:
    now = asyncio.get_running_loop().time
    collecting = asyncio.create_task(gc_tuning.collect_garbage_when_idle(lambda: busy[0] <= now() < busy[1]))
    await asyncio.sleep(seconds)
    collecting.cancel()
    await asyncio.wait({collecting})


def test_gc_collects_new_objects_every_minute(done: list[tuple[str, float]]) -> None:
    virtual_time.run(collect_for(3_700.0))
    assert [at for what, at in done if what == "unfreeze"] == [0.0, 3_600.0, 3_700.0]
    assert [at for what, at in done if what == "collect"] == [60.0 * minute for minute in range(62)]
    assert [what for what, _ in done[-3:]] == ["collect", "freeze", "unfreeze"], "it is left as it was"


def test_gc_disables_automatic_old_collections(done: list[tuple[str, float]]) -> None:
    before = gc.get_threshold()

    async def seen() -> tuple[int, int, int]:
        collecting = asyncio.create_task(gc_tuning.collect_garbage_when_idle(lambda: False))
        await asyncio.sleep(1.0)
        found = gc.get_threshold()
        collecting.cancel()
        await asyncio.wait({collecting})
        return found

    assert virtual_time.run(seen()) == (*before[:2], gc_tuning.DISABLED_THRESHOLD)
    assert gc.get_threshold() == before


def test_gc_is_deferred_while_busy(done: list[tuple[str, float]]) -> None:
    virtual_time.run(collect_for(100.0, busy=(55.0, 75.0)))
    assert [at for what, at in done if what == "collect"] == [0.0, 75.0]
    done.clear()
    virtual_time.run(collect_for(700.0, busy=(0.0, 9_999.0)))
    assert [at for what, at in done if what == "collect"] == [0.0, 660.0]
