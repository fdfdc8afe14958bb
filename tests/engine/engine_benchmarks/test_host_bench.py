"""Host time per step: the benchmark takes the same path as CUDA, and its parts add up."""

import json
from typing import Any

import pytest
from engine_benchmarks import host_bench
from trimtab_engine.core.engine import Engine


def test_every_step_is_queued_ahead_and_replays_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []
    follow = Engine._dispatch_follower

    def noting_follow(engine: Engine, *arguments: Any) -> Any:
        follower = follow(engine, *arguments)
        followed.append(follower is not None)
        return follower

    monkeypatch.setattr(Engine, "_dispatch_follower", noting_follow)
    load = host_bench.Load(3, 20, random=True, prefix_caching=True)
    with host_bench.running_engine(load) as engine:
        measured = host_bench.measure(engine, load, 5)
        assert measured.steps == 5
        assert set(measured.parts_ms) == set(host_bench.PARTS)
        assert all(taken > 0 for taken in measured.parts_ms.values())
        assert sum(measured.parts_ms.values()) <= 2 * measured.step_ms
        assert not engine.has_work
        assert sum(followed) >= host_bench.WARM_UP_STEPS + 5


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_bench.main(["-o", "json", "--steps", "3", "--running", "1", "3", "--context", "20"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [m["running"] for m in report["measurements"]] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "100000"], "it must be 1 to 600"),
        (["--running", "0", "3"], "it must be 1 to 4096"),
        (["--context", "9000"], "it must be 1 to 8192"),
    ],
)
def test_unsupported_load_is_rejected(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit):
        host_bench.main(arguments)
    assert words in capsys.readouterr().err
