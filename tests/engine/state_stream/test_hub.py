"""The hub: several routers receive the state of several cores, at their own speed."""

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
from trimtab_engine.messages.state_stream import CoreReport, Dispatch
from trimtab_engine.state_stream import hub as hub_module
from trimtab_engine.state_stream.hub import StateHub
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import (
    Acknowledged,
    Beat,
    Coefficients,
    Delta,
    Draining,
    FrameReader,
    Hello,
    KeyRule,
    Load,
    Message,
    Resting,
    Snapshot,
    unpack_keys,
)
from trimtab_router.protocol.prefix_keys import CUT_BYTES, KEY_RULE
from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.state import RoutedRequest
from trimtab_router.state_stream.replica import Replica


@dataclass
class Engine:
    """A hub with a clock and cores that the test sets."""

    cores: list[int] = field(default_factory=lambda: [0])
    is_loading: bool = False
    reports: list[bool] = field(default_factory=list)
    now: float = 100.0
    hub: StateHub = field(init=False)

    def __post_init__(self) -> None:
        self.hub = StateHub(self._hello, self.reports.append, lambda: self.now)

    def _hello(self, epoch: str) -> Hello | None:
        return None if self.is_loading else Hello(1, epoch, list(self.cores), 16, KeyRule(KEY_RULE, CUT_BYTES))

    def report(self, core: int = 0, *, load: Load | None = None, **fields: object) -> None:
        self.hub.receive(core, CoreReport(load or Load(), **fields), self.now)  # type: ignore[arg-type]


class Reader:
    """A router that reads frames when the test does."""

    def __init__(self, engine: Engine, router: str = "router") -> None:
        self.stream: AsyncGenerator[bytes, None] = engine.hub.stream(router)
        self._frames = FrameReader()
        self.replica = Replica(Endpoint("a", "host", 1, 2), 0, PrefixIndex())

    async def read(self) -> list[Message]:
        """Return the next frames, which the replica gets too."""
        messages = self._frames.feed(await anext(self.stream))
        for message in messages:
            self.replica.receive(message, 0.0)
        return messages

    def holds(self, *keys: int) -> set[int]:
        return {key for key in keys if self.replica._index.match((key,), 1e9)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "DELTA_SECONDS", 0.0)
    monkeypatch.setattr(hub_module, "BEAT_SECONDS", 0.05)


async def test_stream_begins_with_hello_and_snapshots() -> None:
    engine = Engine(cores=[0, 1])
    first = Reader(engine)
    assert [type(message) for message in await first.read()] == [Hello]
    engine.report(0, load=Load(running=1), added=[7], coefficients=Coefficients(1, 2, 3, 4))
    engine.report(1, load=Load(running=3))
    second = Reader(engine, "other")
    for reader in (first, second):
        messages = [message for message in await reader.read() if isinstance(message, Snapshot)]
        assert [(snapshot.core, snapshot.load.running) for snapshot in messages] == [(0, 1), (1, 3)]
        assert messages[0].coefficients == Coefficients(1, 2, 3, 4)
        assert reader.holds(7) == {7}


async def test_changes_between_two_reads_are_merged() -> None:
    engine = Engine()
    reader = Reader(engine)
    await reader.read()
    engine.report()
    await reader.read()
    for number in range(1, 50):
        engine.report(load=Load(running=number), added=[number, 1000], removed=[number - 1, 1000])
    (delta,) = await reader.read()
    assert isinstance(delta, Delta)
    assert delta.load is not None
    assert delta.load.running == 49
    assert set(unpack_keys(delta.added)) == {49, 1000}


async def test_idle_stream_sends_beats() -> None:
    engine = Engine()
    reader = Reader(engine)
    await reader.read()
    engine.report()
    await reader.read()
    engine.report()  # nothing changed
    assert await reader.read() == [Beat()]


async def test_running_step_is_reported_with_its_remaining_time() -> None:
    engine = Engine()
    reader = Reader(engine)
    await reader.read()
    engine.report(load=Load(step_seconds=2.0))
    engine.now += 0.5
    (snapshot,) = await reader.read()
    assert isinstance(snapshot, Snapshot)
    assert snapshot.load.step_seconds == 1.5


async def test_dispatches_are_acknowledged_to_their_router_after_their_load() -> None:
    engine = Engine()
    one, two = Reader(engine, "one"), Reader(engine, "two")
    for reader in (one, two):
        await reader.read()
        reader.replica.dispatched(1, RoutedRequest(10), 0.0)
    engine.report(load=Load(running=1), dispatches=[Dispatch("one", 1), Dispatch("gone", 1)])
    assert [type(message) for message in await one.read()] == [Snapshot, Acknowledged]
    assert [type(message) for message in await two.read()] == [Snapshot]
    assert [reader.replica.state.pending_requests for reader in (one, two)] == [0, 1]


async def test_acknowledgements_of_a_broken_stream_are_sent_again() -> None:
    engine = Engine()
    keeps_reporting, first = Reader(engine, "other"), Reader(engine)
    await keeps_reporting.read()
    await first.read()
    await first.stream.aclose()
    engine.report(dispatches=[Dispatch("router", 5)])
    messages = await Reader(engine).read()
    assert Acknowledged([5]) in messages


async def test_drain_pause_and_sleep_are_announced_to_old_and_new_streams() -> None:
    engine = Engine()
    old = Reader(engine)
    await old.read()
    engine.hub.rest("keep", None)
    assert await old.read() == [Resting(pause="keep")]
    new = Reader(engine, "new")
    assert (await new.read())[1:] == [Resting(pause="keep")]
    engine.hub.rest(None, None)
    assert await old.read() == [Resting()]
    assert not old.replica.state.draining
    engine.hub.drain(30.0)
    assert await old.read() == [Draining(30.0)]
    assert Draining(30.0) in await new.read()


async def test_changed_cores_begin_the_stream_again() -> None:
    engine = Engine(cores=[0, 1])
    reader = Reader(engine)
    await reader.read()
    engine.report(0, added=[1])
    engine.report(1, added=[2])
    await reader.read()
    engine.cores = [0]
    engine.hub.remove_core(1)
    assert [type(message) for message in await reader.read()] == [Hello, Snapshot]
    assert reader.holds(1, 2) == {1}


async def test_cores_report_while_a_router_listens_and_some_time_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LINGER_SECONDS", 0.02)
    engine = Engine()
    assert engine.reports == []
    reader = Reader(engine)
    await reader.read()
    engine.report(added=[1])
    await reader.stream.aclose()
    again = Reader(engine)
    await again.read()
    await asyncio.sleep(0.04)
    assert (engine.reports, again.holds(1)) == ([True], {1})
    await again.stream.aclose()
    await asyncio.sleep(0.04)
    assert engine.reports == [True, False]
    assert [type(message) for message in await Reader(engine).read()] == [Hello]


async def test_streams_end_when_the_hub_closes() -> None:
    engine = Engine()
    reader = Reader(engine)
    await reader.read()
    engine.hub.close()
    with pytest.raises(StopAsyncIteration):
        await reader.read()
    assert not engine.hub.has_room


async def test_large_snapshot_is_sent_in_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_KEYS_PER_FRAME", 10)
    engine = Engine()
    reader = Reader(engine)
    await reader.read()
    engine.report(added=list(range(35)))
    assert len(await reader.read()) == 4
    assert reader.holds(*range(35)) == set(range(35))
    engine.report(removed=list(range(30)), added=list(range(100, 112)))
    await reader.read()
    assert reader.holds(*range(200)) == {*range(30, 35), *range(100, 112)}


@pytest.mark.parametrize("seed", range(10))
async def test_picture_of_each_router_equals_cores_after_random_reports(seed: int) -> None:
    """Cores join, end and change; routers come, go and read at any time."""
    rng, engine = random.Random(seed), Engine(cores=[0, 1])
    held: dict[int, set[int]] = {0: set(), 1: set()}
    readers = [Reader(engine, "r0")]
    await readers[0].read()
    for step in range(200):
        action = rng.random()
        if action < 0.6:
            core = rng.choice(engine.cores)
            added = {rng.randrange(40) for _ in range(rng.randrange(4))} - held[core]
            removed = set(rng.sample(sorted(held[core]), min(len(held[core]), rng.randrange(3))))
            held[core] = (held[core] - removed) | added
            load = Load(running=rng.randrange(5))
            engine.report(core, load=load, added=list(added), removed=list(removed))
        elif action < 0.75 and len(readers) < 3:
            readers.append(Reader(engine, f"r{step}"))
            await readers[-1].read()
        elif action < 0.8 and len(readers) > 1:
            await readers.pop(rng.randrange(len(readers))).stream.aclose()
        elif action < 0.83:
            core = rng.choice([0, 1, 2])
            if core in engine.cores and len(engine.cores) > 1:
                engine.cores.remove(core)
                held[core] = set()
                engine.hub.remove_core(core)
            elif core not in engine.cores:
                engine.cores.append(core)
                held[core] = set()
                engine.report(core)
        else:
            await rng.choice(readers).read()
    for reader in readers:
        await reader.read()
        await reader.read()
        expected = set[int]().union(*(held[core] for core in engine.cores))
        assert reader.holds(*range(40)) == expected
