"""Figures of the layouts' measurement. The engines themselves are tested elsewhere."""

from typing import Any

from engine_benchmarks.parallel_bench import Run, row_of
from engine_benchmarks.parallel_page import page
from engine_benchmarks.parallel_scaling import scaling_rows
from trimtab_engine.messages.requests import StepStats


def test_ratios_are_per_round_and_bytes_per_step() -> None:
    alone = [Run(tokens_per_second=rate) for rate in (10.0, 20.0, 40.0)]
    together = [Run(tokens_per_second=rate) for rate in (5.0, 20.0, 20.0)]
    for index, tokens in enumerate((30, 10)):
        stats = StepStats(1, 0.0, 0.1, "decode", 1, 0, 1, 4, 4, num_scheduled_tokens=2, num_generation_tokens=tokens)
        stats.wire_bytes, stats.engine_index = {"all_reduce": 1000}, index
        together[-1].note(stats)
    row = row_of("TP2", alone, together)
    assert (row["one_rank_tokens_per_second"], row["tokens_per_second"], row["ratio"]) == (20.0, 20.0, 0.5)
    assert row["wire_bytes_per_step"] == {"all_reduce": 1000}
    assert row["tokens_of_fullest_core_over_mean"] == 1.5


def test_load_is_weighted_by_duration() -> None:
    run = Run()
    for now, core, num_running in ((0.0, 0, 3), (1.0, 1, 1), (2.0, 0, 1), (5.0, 1, 1)):
        stats = StepStats(1, now, 0.1, "decode", num_running, 0, 1, 4, 4, num_scheduled_tokens=1)
        stats.engine_index = core
        run.note(stats)
    # 1 s with one core known, 1 s at 3 and 1 (1.5 of the mean), 3 s at 1 and 1
    assert run.load_max_over_mean == (1 * 1.0 + 1 * 1.5 + 3 * 1.0) / 5


def test_page_lists_every_layout_and_marks_simulation() -> None:
    row = row_of("TP2", [Run(tokens_per_second=20.0)], [Run(tokens_per_second=10.0, tokens_of_cores={0: 4})])
    row["wire_bytes_per_step"] = {"all_reduce": 810_263}
    results: dict[str, Any] = {
        "machine": {"cpus": 2, "cpu": "some CPU", "python": "3.11", "versions": {"torch": "2.13"}},
        "command": "bench",
        "load_average_before": 0.1,
        "rounds": 3,
        "layouts": [{"model": "dense"} | row],
        "balance": [
            {
                "way": "in turns",
                "load_max_over_mean": 1.2,
                "tokens_of_fullest_core_over_mean": 1.1,
                "mean_latency_seconds": 0.3,
            }
        ],
        "simulated": scaling_rows(),
    }
    text = page(results)
    assert "| dense | TP2 | 20.0 | 10.0 | 0.5 | 0 | 810,263 |  |" in text
    assert "| in turns | 1.2 | 1.1 | 0.3 |" in text
    on_a_busy_machine = page(results | {"load_average_before": 1.1})
    assert "| dense | TP2 |  |  |  | 0 | 810,263 |  |" in on_a_busy_machine
    assert "the load average was 1.1 on 2 CPUs" in on_a_busy_machine
    assert "simulated, not measured" in text
    assert "| Llama-3.1-70B | one GPU | 1 | do not fit | 131.4 |" in text
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables), "columns line up"
