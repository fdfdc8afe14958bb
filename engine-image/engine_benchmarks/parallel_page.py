"""The layouts' figures as a page and a plot."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine_benchmarks import parallel_scaling as scaling

Row = dict[str, Any]
COLLECTIVES = ("all_reduce", "gather", "point_to_point", "all_gather", "reduce_scatter")
LAYOUTS_NOTE = """\
16 requests at once, 32 tokens in and 32 out, real cores and ranks as processes over gloo, float32, one thread per rank.
`dense` and `moe` have random weights (8 layers, hidden size 512, 8 heads, 4 KV heads, vocabulary 16,000; `moe`
is a Qwen3-MoE with 8 experts of width 512, 2 per token). One rank and the layouts alternate; rates are medians of the
rounds ({rounds}), ratios are taken within a round. **With {cpus} CPUs and up to four ranks this shows overhead
and correctness, not speed-up.**"""
BYTES_NOTE = """\
The columns after the steps are bytes per step on the wire of the core's own rank, as sent by a ring, independent of the
backend's algorithm; a gather and point-to-point transfers count at the receiver. They depend on the distribution of
requests over steps, not on the machine's load. Steps of data-parallel layouts are the sum over both cores."""
IMAGE_LINK = "![ratios](parallel.svg)"
BUSY = """\
**Rates, ratios and latencies are left out**: the load average was {load} on {cpus} CPUs before the first engine was
started, so they would measure the other work on the machine; the balance below was measured on the busy machine, too.
On an idle machine, the same command reports all of them."""
IDLE_LOAD = 0.5  # per CPU: above it, other processes compete with the ranks
BALANCE_NOTE = """\
## Balance of data-parallel cores

Two cores, 48 requests at random times (50 ms apart on average), a quarter of the outputs 96 tokens long, the others 4:
sent to the least loaded core, or in turns (`X-data-parallel-rank`). Requests of the fuller core over the mean
of the two, over time: 1 is perfect. On recorded traces, with computed step times:
[data-parallel-balance.md](data-parallel-balance.md)."""
ASSUMPTIONS = f"""\
## Scaling to eight GPUs: simulated, not measured

No machine with two GPUs was available. A roofline (`parallel_scaling.py`) of decode on {scaling.GPU}s, with
{scaling.BATCH} requests of {scaling.CONTEXT} tokens over all GPUs, limited by memory. Assumptions:

- bf16 throughout; {scaling.USABLE:.0%} of {scaling.MEMORY_BYTES / 2**30:.0f} GiB for weights and KV cache.
- A rank takes the longer of reading weights, keys and values at {scaling.BANDWIDTH / 1e12} TB/s and computing at
  {scaling.FLOPS / 1e12:.0f} TFLOP/s (both reached on one H200). Experts are read as often as random routing hits them.
- Collectives are rings over NVLink at {scaling.LINK / 1e9:.0f} GB/s, and cost
  {scaling.LINK_LATENCY_SECONDS * 1e6:.0f} µs each in addition (assumed): two all-reduces per layer over TP, a gather
  and a scatter per layer of an MoE over DP. Nothing overlaps.
- A pipeline has as many steps in flight as stages; a stage has work {scaling.PIPELINE_BALANCE:.0%} of the time
  (assumed). Host and sampling cost nothing."""
SIMULATED_HEAD = (
    "model", "layout", "GPUs", "requests", "weights per GPU, GiB", "step, ms", "exchange", "tokens/s", "per GPU",
    "over the smallest",
)  # fmt: skip
END = "Not measured: NCCL, layouts on CUDA, anything over more than one GPU or a real network."


def page(results: Row) -> str:
    """Return docs/results/parallel.md."""
    where = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    made = (
        f"`{results['command']}` on {where['cpus']} × {where['cpu']}, Python {where['python']}, {versions}; load "
        f"average before it {results['load_average_before']}. Made by that command; do not edit."
    )
    busy = is_busy(results)
    parts = [
        "# Parallel layouts",
        made,
        LAYOUTS_NOTE.format(rounds=results["rounds"], cpus=where["cpus"]),
        *([BUSY.format(load=results["load_average_before"], cpus=where["cpus"])] if busy else []),
        _table(
            ["model", "layout", "tokens/s, one rank", "tokens/s", "ratio", "steps", *COLLECTIVES],
            (_layout_cells(row, busy) for row in results["layouts"]),
        ),
        BYTES_NOTE,
        *([] if busy else [IMAGE_LINK]),
        BALANCE_NOTE,
        _table(
            ["sent", "requests, max/mean", "tokens served, max/mean", "mean latency, s"],
            (_balance_cells(row, busy) for row in results["balance"]),
        ),
        ASSUMPTIONS,
        _table(
            SIMULATED_HEAD,
            (_simulated_cells(row) for row in results["simulated"]),
        ),
        END,
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def is_busy(results: Row) -> bool:
    """Return True if other work would have affected the rates."""
    return bool(results["load_average_before"] > IDLE_LOAD * results["machine"]["cpus"])


def _layout_cells(row: Row, busy: bool) -> list[Any]:
    wire = row["wire_bytes_per_step"]
    rates = [row["one_rank_tokens_per_second"], row["tokens_per_second"], row["ratio"]]
    cells = [row["model"], row["layout"], *([""] * len(rates) if busy else rates)]
    return [*cells, row["steps"], *(f"{wire[kind]:,}" if kind in wire else "" for kind in COLLECTIVES)]


def _balance_cells(row: Row, busy: bool) -> list[Any]:
    latency = "" if busy else row["mean_latency_seconds"]
    return [row["way"], row["load_max_over_mean"], row["tokens_of_fullest_core_over_mean"], latency]


def _simulated_cells(row: Row) -> list[Any]:
    head = [row["model"], row["layout"], row["gpus"]]
    if not row["requests"]:
        return [*head, "do not fit", row["weights_gib_per_gpu"], "", "", "", "", ""]
    rates = [f"{row['tokens_per_second']:,}", f"{row['tokens_per_second_per_gpu']:,}"]
    factor = f"{row['factor']} × {row['factor_base_gpus']} GPU" + "s" * (row["factor_base_gpus"] > 1)
    head += [row["requests"], row["weights_gib_per_gpu"], row["step_ms"], f"{row['exchange_share']:.0%}"]
    return [*head, *rates, factor]


def plot(results: Row, path: Path) -> None:
    """Plot each layout's rate over one rank's; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = results["layouts"]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    models = list(dict.fromkeys(row["model"] for row in rows))
    for place, row in enumerate(rows):
        axes.bar(place, row["ratio"], color=f"C{models.index(row['model'])}")
    for index, model in enumerate(models):
        axes.bar(0, 0, color=f"C{index}", label=model)
    axes.axhline(1.0, color="black", linestyle="dotted")
    axes.set_xticks(range(len(rows)), [row["layout"] for row in rows], rotation=30, ha="right")
    axes.set_ylabel("tokens/s over one rank's")
    axes.set_title(f"Layouts on {results['machine']['cpus']} CPUs: overhead, not speed-up")
    axes.legend()
    figure.tight_layout()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trimtab"}):
        figure.savefig(path, metadata={"Date": None})
