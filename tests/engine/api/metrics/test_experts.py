"""The metrics of balancing experts."""

from trimtab_engine.api.metrics.families import EngineMetrics
from trimtab_engine.messages import ExpertBalance, StepStats


def a_step(balance: ExpertBalance | None) -> StepStats:
    return StepStats(1, 0.0, 0.1, "decode", 1, 0, 1, 4, 4, expert_balance=balance)


def samples(metrics: EngineMetrics) -> dict[str, str]:
    lines = metrics.exposition().decode().splitlines()
    mine = (line for line in lines if line.startswith("trimtab_expert_") and "_created" not in line)
    return {line.split("{")[0].removeprefix("trimtab_expert_"): line.split()[-1] for line in mine}


def test_without_balancing_there_is_no_balancedness() -> None:
    metrics = EngineMetrics("m", 128)
    metrics.on_step(a_step(None))
    assert samples(metrics) == {
        "rearrangements_total": "0.0",
        "moved_bytes_total": "0.0",
        "rearrange_seconds_total": "0.0",
    }


def test_the_newest_balancedness_stands_and_what_was_moved_adds_up() -> None:
    metrics = EngineMetrics("m", 128)
    metrics.on_step(a_step(ExpertBalance(0.5)))
    metrics.on_step(a_step(ExpertBalance(0.75, 1, 1000, 0.25)))
    metrics.on_step(a_step(ExpertBalance(None, 1, 500, 0.25)))
    assert samples(metrics) == {
        "balancedness": "0.75",
        "rearrangements_total": "2.0",
        "moved_bytes_total": "1500.0",
        "rearrange_seconds_total": "0.5",
    }
