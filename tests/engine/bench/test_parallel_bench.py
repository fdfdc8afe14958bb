"""The layouts' measurement: what becomes of the figures. The engines that it starts are tested elsewhere."""

from trimtab_engine.bench.parallel_bench import Run, row_of
from trimtab_engine.messages import StepStats


def test_ratios_are_taken_within_a_round_and_bytes_are_those_of_a_step() -> None:
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
