"""The table of hot loops."""

from dataclasses import replace

from kernel_benchmarks.aot.compiler import Compiled
from kernel_benchmarks.aot.hot_loops import COLUMNS, hot_loop_table
from kernel_benchmarks.aot.machine_code import Loop

RESULT = Compiled("case", "kernel", 90, 8, 3, 128, 0, 200_000, True, "source", "key")
LOOP = Loop(instructions=800, products=12, flops=1 << 19, waits=1, load_bytes=4096)


def test_row_shows_bottleneck_and_attainable_share() -> None:
    lines = hot_loop_table([replace(RESULT, hot_loop=LOOP, is_memory_bound=False)])
    row = "| case | kernel | 12 / 1 | 32 | 1024 | 1600 | 0 | 0 | 0 | L2 845 | 2624 | 1 | 32 | chain | 0.39 |"
    assert row in lines
    assert row.count("|") == len(COLUMNS) + 1


def test_targets_without_analysed_loops_have_no_row() -> None:
    assert hot_loop_table([RESULT]) == []
