"""Machine limits: read bandwidth, and the matrix rate at a model's shapes. Other measurements are shares of them.

python -m engine_benchmarks.machine_bench MODEL [-o json]
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from trimtab_engine.layers.linear import Linear
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_modelspec.config import ModelConfig

READ_BYTES = 512 << 20  # far beyond any last-level cache
STREAMED_BYTES = 256 << 20  # distinct weights per shape, so that they are read from memory as in a decode step
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 5  # the best of these: other work on the machine only makes a run slower


@dataclass(frozen=True, slots=True)
class MachineRates:
    """gflops by rows: all GEMMs of a layer at that many rows. `layouts` records the alternatives."""

    num_threads: int
    read_gb_per_second: float
    gflops: dict[int, float]
    layouts: dict[str, dict[int, float]]

    def best_of(self, other: "MachineRates") -> "MachineRates":
        """Return the better of two measurements, number by number: other work on the machine only lowers one."""
        return MachineRates(
            self.num_threads,
            max(self.read_gb_per_second, other.read_gb_per_second),
            {rows: max(rate, other.gflops[rows]) for rows, rate in self.gflops.items()},
            {
                name: {rows: max(rate, other.layouts[name][rows]) for rows, rate in rates.items()}
                for name, rates in self.layouts.items()
            },
        )

    def best_gflops(self, rows: int) -> float:
        """Return the best rate of any layout at `rows` rows, or at the next larger number that was measured."""
        size = next((r for r in sorted(self.gflops) if r >= rows), max(self.gflops))
        return max([self.gflops[size], *(rates[size] for rates in self.layouts.values())])


def best_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the shortest of several runs, after a warm-up."""
    work()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def measure_read() -> float:
    """Return the GB/s of summing a large float32 array with all threads."""
    array = torch.ones(READ_BYTES // 4)
    return READ_BYTES / best_seconds(array.sum) / 1e9


def layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return [out, in] of a decoder layer's four GEMMs."""
    heads, kv = config.num_attention_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, wide = config.hidden_size, config.intermediate_size
    return [(heads + 2 * kv, hidden), (hidden, heads), (2 * wide, hidden), (hidden, wide)]


@torch.inference_mode()
def measure_machine(config: ModelConfig, rows: tuple[int, ...] = ROWS) -> MachineRates:
    """Measure read bandwidth, and GFLOP/s of the engine's linear layer and of plain alternatives."""
    shapes = layer_shapes(config)
    layer_bytes = sum(4 * n * k for n, k in shapes)
    weights = [[torch.randn(n, k) for n, k in shapes] for _ in range(max(2, STREAMED_BYTES // layer_bytes))]
    flops_per_row = 2 * sum(n * k for n, k in shapes) * len(weights)

    def rates(layers: list[list[Any]], product: Callable[[torch.Tensor, Any], object]) -> dict[int, float]:
        result = {}
        for count in rows:
            inputs = [torch.randn(count, k) for _, k in shapes]

            def work(inputs: list[torch.Tensor] = inputs) -> None:
                for layer in layers:
                    for x, weight in zip(inputs, layer, strict=True):
                        product(x, weight)

            result[count] = count * flops_per_row / best_seconds(work) / 1e9
        return result

    engine = rates([[Linear(w) for w in layer] for layer in weights], lambda x, linear: linear(x))
    transposed = [[w.t().contiguous() for w in layer] for layer in weights]
    return MachineRates(
        num_threads=torch.get_num_threads(),
        read_gb_per_second=measure_read(),
        gflops=engine,
        layouts={
            "F.linear": rates(weights, torch.nn.functional.linear),
            "x @ W^T contiguous": rates(transposed, torch.matmul),
        },
    )


def main(
    model: Annotated[str, typer.Argument(help="folder or .gguf file whose shapes are used")],
    output: Annotated[Literal["table", "json"], typer.Option("-o", "--output")] = "table",
    threads: Annotated[int, typer.Option(help="CPU threads")] = 2,
) -> None:
    """Print the machine's rates."""
    torch.set_num_threads(threads)
    source = open_model(model)
    result = measure_machine(parse_model_config(source.config, source.generation_config, source.where))
    if output == "json":
        typer.echo(json.dumps(asdict(result)))
        return
    title = f"GFLOP/s by rows, {threads} threads; reading {result.read_gb_per_second:.1f} GB/s"
    table = Table("layout", *map(str, ROWS), title=title)
    for name, measured in {"engine": result.gflops, **result.layouts}.items():
        table.add_row(name, *(f"{measured[rows]:.0f}" for rows in ROWS))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
