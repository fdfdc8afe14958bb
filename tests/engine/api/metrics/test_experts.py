"""Metrics of expert load balancing."""

from trimtab_engine.api.metrics.families import EngineMetrics
from trimtab_engine.messages.requests import ExpertBalance, StepStats


def make_step(balance: ExpertBalance | None) -> StepStats:
    return StepStats(1, 0.0, 0.1, "decode", 1, 0, 1, 4, 4, expert_balance=balance)


def samples(metrics: EngineMetrics) -> dict[str, str]:
    lines = metrics.exposition().decode().splitlines()
    mine = (line for line in lines if line.startswith("trimtab_expert_") and "_created" not in line)
    return {line.split("{")[0].removeprefix("trimtab_expert_"): line.split()[-1] for line in mine}


def test_no_balancedness_without_balancing() -> None:
    metrics = EngineMetrics("m", 128)
    metrics.on_step(make_step(None))
    assert samples(metrics) == {
        "rearrangements_total": "0.0",
        "moved_bytes_total": "0.0",
        "rearrange_seconds_total": "0.0",
    }


def test_latest_balancedness_is_shown_and_moved_bytes_add_up() -> None:
    metrics = EngineMetrics("m", 128)
    metrics.on_step(make_step(ExpertBalance(0.5)))
    metrics.on_step(make_step(ExpertBalance(0.75, 1, 1000, 0.25)))
    metrics.on_step(make_step(ExpertBalance(None, 1, 500, 0.25)))
    assert samples(metrics) == {
        "balancedness": "0.75",
        "rearrangements_total": "2.0",
        "moved_bytes_total": "1500.0",
        "rearrange_seconds_total": "0.5",
    }
