"""Dead ranks are reported immediately with their cause."""

import os
import queue
import signal
from collections.abc import Callable
from typing import Any

import pytest
import waiting
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import WorkerDied
from trimtab_engine.executor import workers

DEADLINE_SECONDS = 120.0  # generous, because machines may be busy


def _step_on(engine: Engine) -> None:
    for _ in range(1000):
        engine.step()


def pid_of_rank(engine: Engine, rank: int) -> int:
    return int(engine.layout()["ranks"][rank]["pid"])


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_a_rank_killed_under_load_ends_the_step_with_its_name_and_the_cause(
    layout: dict[str, int], models: dict[str, str], start: Callable[..., Engine], serving: Any
) -> None:
    _, requests, _ = serving
    engine = start(models["dense"], **layout)
    own = os.getpid()
    victim = next(rank for rank in (0, 1) if pid_of_rank(engine, rank) != own)
    for request in requests(output=60):
        engine.add(request)
    engine.step()
    os.kill(pid_of_rank(engine, victim), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"rank {victim} \(.*pid \d+\) was killed by SIGKILL"):
        _step_on(engine)


def test_idle_rank_death_is_reported_from_thread(models: dict[str, str], start: Callable[..., Engine]) -> None:
    told: queue.Queue[tuple[str, int]] = queue.Queue()
    engine = start(models["dense"], tensor_parallel_size=2, on_rank_death=lambda cause, code: told.put((cause, code)))
    os.kill(pid_of_rank(engine, 1), signal.SIGABRT)
    cause, exit_code = told.get(timeout=DEADLINE_SECONDS)
    assert exit_code == 1
    assert "rank 1 " in cause
    assert "SIGABRT" in cause


def test_rank_ignores_sigterm_while_engine_runs(
    models: dict[str, str], start: Callable[..., Engine], serving: Any
) -> None:
    """Pods of a group get SIGTERM at the same time; the core drains and then ends its ranks."""
    _, requests, _ = serving
    engine = start(models["dense"], tensor_parallel_size=2)
    victim = pid_of_rank(engine, 1)
    for request in requests(output=8):
        engine.add(request)
    engine.step()
    os.kill(victim, signal.SIGTERM)
    while engine.has_work:
        engine.step()
    engine.close()
    waiting.until_gone([victim])


def test_frozen_rank_is_reported(models: dict[str, str], start: Callable[..., Engine]) -> None:
    told: queue.Queue[tuple[str, int]] = queue.Queue()
    engine = start(models["dense"], tensor_parallel_size=2, on_rank_death=lambda cause, code: told.put((cause, code)))
    victim = pid_of_rank(engine, 1)
    os.kill(victim, signal.SIGSTOP)
    try:
        cause, _ = told.get(timeout=DEADLINE_SECONDS)
    finally:
        os.kill(victim, signal.SIGKILL)
    assert "rank 1 " in cause
    assert "has been silent for 5 s" in cause


def test_failed_rank_start_is_reported_without_processes(
    models: dict[str, str], start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WORKER_COMMAND", ("/bin/sh", "-c", "exit 3"))
    with pytest.raises(WorkerDied, match=r"rank 1 .* ended with exit code 3"):
        start(models["dense"], tensor_parallel_size=2)


def test_closing_ends_every_rank(models: dict[str, str], start: Callable[..., Engine]) -> None:
    engine = start(models["dense"], tensor_parallel_size=2)
    victim = pid_of_rank(engine, 1)
    engine.close()
    engine.close()  # again does nothing
    waiting.until_gone([victim])
