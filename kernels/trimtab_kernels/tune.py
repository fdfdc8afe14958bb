"""Measures the launch configurations of w8a8_block_fp8 for a model's shapes on the GPUs that are present.

`python -m trimtab_kernels.tune MODEL_FOLDER [--tensor-parallel-size 8] [--batch-size 1 64 …] [--save-path FOLDER]`

The shapes come from the model's config.json: the projections of attention and MLP as one rank of the tensor-parallel
group holds them. For every shape and number of tokens each configuration of a pruned grid is timed; the best ones go
into one file per shape and GPU name (gemm_config), written after each number of tokens, so that an interrupted run goes
on where it stopped. With several GPUs the numbers of tokens are dealt out to them.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab_kernels.device_facts import DeviceFacts, device_facts
from trimtab_kernels.gemm_config import (
    CONFIG_FOLDER,
    MAX_SPLIT_K,
    MIN_STEPS_PER_PART,
    GemmConfig,
    config_file_name,
    default_config,
    device_name,
)
from trimtab_kernels.jit import cdiv, next_power_of_2
from trimtab_kernels.w8a8_block_fp8 import quantize_groups_triton, w8a8_block_fp8_reference, w8a8_block_fp8_triton

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
WARM_UP_RUNS, TIMED_RUNS = 5, 10
MOST_ACCUMULATORS = 128 * 256
"""fp32 sums of one program: 255 registers of 256 threads hold no more, with the operands beside them."""
RELATIVE_ERROR = 2**-6
"""Of the largest value: bf16 rounds to 2**-8; a faulty configuration is off by far more."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Weights [n, k] of a projection."""

    n: int
    k: int


def shapes_of(config: dict[str, Any], tensor_parallel_size: int = 1) -> list[Shape]:
    """Distinct (N, K) of one rank's dense projections. Raises KeyError where the config lacks a size.

    q, k and v are one product, gate and up another, as the engine computes them. Column-parallel projections divide N,
    row-parallel ones K. DeepSeek's latent attention has its own projections; experts are fused_moe's.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    tp = tensor_parallel_size
    shapes: list[Shape] = []
    if "kv_lora_rank" in config:
        rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        latent, value = config["kv_lora_rank"], config["v_head_dim"]
        if config.get("q_lora_rank"):
            shapes += [Shape(config["q_lora_rank"] + latent + rope, hidden)]
            shapes += [Shape(heads * (rope + nope) // tp, config["q_lora_rank"])]
        else:
            shapes += [Shape(heads * (rope + nope) // tp, hidden), Shape(latent + rope, hidden)]
        shapes += [Shape(heads * (nope + value) // tp, latent), Shape(hidden, heads * value // tp)]
    else:
        size = config.get("head_dim") or hidden // heads
        kv_heads = max(config.get("num_key_value_heads", heads), tp)
        shapes += [Shape((heads + 2 * kv_heads) * size // tp, hidden), Shape(hidden, heads * size // tp)]
    wide = [config["intermediate_size"]]
    if config.get("n_shared_experts"):
        wide.append(config["n_shared_experts"] * config["moe_intermediate_size"])
    for size in wide:
        shapes += [Shape(2 * size // tp, hidden), Shape(hidden, size // tp)]
    return list(dict.fromkeys(shapes))


def search_space(num_tokens: int, shape: Shape, facts: DeviceFacts) -> list[GemmConfig]:
    """Configurations worth timing; the default is always among them."""
    candidates = [default_config(num_tokens, shape.n, shape.k, facts)]
    padded = next_power_of_2(num_tokens)
    tallest = min(256, max(16, 2 * padded))  # taller tiles would compute padding
    lowest = min(64, max(16, padded // 2))  # lower ones would read the weights again and again
    for block_m, block_n, block_k, group_m, warps, stages, split in itertools.product(
        (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128), (1, 16, 32), (4, 8), (2, 3, 4, 5), (1, 2, 4, 8)
    ):
        config = GemmConfig(block_m, block_n, block_k, group_m, warps, stages, split)
        if lowest <= block_m <= tallest and _is_sensible(config, num_tokens, shape, facts):
            candidates.append(config)
    return list(dict.fromkeys(candidates))


def _is_sensible(config: GemmConfig, num_tokens: int, shape: Shape, facts: DeviceFacts) -> bool:
    rows, columns = cdiv(num_tokens, config.block_m), cdiv(shape.n, config.block_n)
    accumulators = config.block_m * config.block_n
    return (
        config.operand_bytes <= facts.shared_bytes
        and accumulators <= MOST_ACCUMULATORS
        and accumulators >= 32 * config.num_warps * 2  # less than two sums per thread leaves threads idle
        and (config.num_warps == 8 or accumulators <= 128 * 128)
        and (config.group_m == 1 or rows > 1)  # one row of tiles has one order
        and config.split_k <= min(MAX_SPLIT_K, max(1, cdiv(shape.k, 128) // MIN_STEPS_PER_PART))
        and (config.split_k == 1 or rows * columns < 2 * facts.num_sms)  # enough programs without
        and (config.block_k == 128 or config.split_k == 1)
    )


def missing_batches(path: Path, batch_sizes: list[int]) -> list[int]:
    """What an earlier run has not measured yet."""
    done = json.loads(path.read_text()) if path.exists() else {}
    return [m for m in batch_sizes if str(m) not in done]


def save(path: Path, num_tokens: int, config: GemmConfig) -> None:
    """Add one entry, in the order of M. Written beside and renamed."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[str(num_tokens)] = config.to_json()
    ordered = {m: entries[m] for m in sorted(entries, key=int)}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(ordered, indent=4) + "\n")
    beside.replace(path)


def deal(batch_sizes: list[int], num_gpus: int) -> list[list[int]]:
    """One share per GPU, large and small ones alike in each: large ones take longest."""
    return [batch_sizes[index::num_gpus] for index in range(num_gpus)]


def best_of(
    candidates: list[GemmConfig], seconds: Callable[[GemmConfig], float | None]
) -> tuple[GemmConfig, float] | None:
    """The fastest; None for a candidate means that it cannot be launched or is wrong. None in all: None."""
    timed = [(taken, index) for index, config in enumerate(candidates) if (taken := seconds(config)) is not None]
    if not timed:
        return None
    taken, index = min(timed)
    return candidates[index], taken


def _measure(config: GemmConfig, operands: tuple[torch.Tensor, ...], expected: torch.Tensor) -> float | None:
    """Seconds per product, by CUDA events. The weights rotate through the cache as they would between layers."""
    a, a_scales, b, b_scales = operands
    try:
        found = w8a8_block_fp8_triton(a, a_scales, b, b_scales, torch.bfloat16, config=config)
        torch.cuda.synchronize()
    except Exception as error:  # Triton raises its own, ptxas and driver errors of many types
        if "out of resource" not in str(error).lower() and "OutOfResources" not in type(error).__name__:
            print(f"skipped {config}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None
    if float((found.float() - expected).abs().max()) > RELATIVE_ERROR * float(expected.abs().max()):
        print(f"skipped {config}: its result is wrong", file=sys.stderr)
        return None
    flush = torch.empty(64 << 20, dtype=torch.uint8, device=a.device)
    event: Any = torch.cuda.Event
    total = 0.0
    for run in range(WARM_UP_RUNS + TIMED_RUNS):
        flush.zero_()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        w8a8_block_fp8_triton(a, a_scales, b, b_scales, torch.bfloat16, config=config)
        end.record()
        end.synchronize()
        if run >= WARM_UP_RUNS:
            total += start.elapsed_time(end) / 1000
    return total / TIMED_RUNS


def _tune_share(gpu: int, jobs: list[tuple[Shape, int]], folder: str, done: Any) -> None:
    """In a process of its own: time its jobs on its GPU and report each as (shape, tokens, config, seconds)."""
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    facts = device_facts(device)
    for shape, num_tokens in jobs:
        a, a_scales = quantize_groups_triton(torch.randn(num_tokens, shape.k, device=device))
        b = torch.randn(shape.n, shape.k, device=device).to(torch.float8_e4m3fn)
        b_scales = torch.rand(cdiv(shape.n, 128), cdiv(shape.k, 128), device=device) + 0.5
        operands = (a, a_scales, b, b_scales)
        expected = w8a8_block_fp8_reference(*operands, torch.float32)
        found = best_of(
            search_space(num_tokens, shape, facts),
            lambda c, o=operands, e=expected: _measure(c, o, e),  # type: ignore[misc]
        )
        done.put((shape, num_tokens, found))
    done.put(None)


def _progress(done: int, total: int, started: float) -> Iterator[str]:
    elapsed = time.monotonic() - started
    yield f"[{done}/{total}] {elapsed:.0f} s"
    if done:
        yield f"about {math.ceil(elapsed / done * (total - done))} s left"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder with config.json, or the file itself")
    parser.add_argument(
        "--tensor-parallel-size",
        type=_positive,
        default=1,
        metavar="N",
        help="ranks that split each layer (default: 1)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        nargs="+",
        default=list(BATCH_SIZES),
        metavar="TOKENS",
        help=f"numbers of tokens to measure (default: {' '.join(map(str, BATCH_SIZES))})",
    )
    parser.add_argument(
        "--save-path",
        type=Path,
        default=CONFIG_FOLDER,
        metavar="FOLDER",
        help="where the files go, one per shape and GPU name; what is in them is not measured again (default: the "
        "package's own folder, where the engine looks)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print shapes and sizes of the search, and end; no GPU")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def read_shapes(model: Path, tensor_parallel_size: int) -> list[Shape]:
    """The shapes of the model at this path. Raises ValueError that says what is wrong with it."""
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text())
        shapes = shapes_of(config, tensor_parallel_size)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a folder with a config.json, or the file") from None
    except KeyError as error:
        raise ValueError(f"{path}: has no {error.args[0]}; the config.json of a model is needed") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: is not a model's config.json: {error}") from None
    for name in ("num_attention_heads", "intermediate_size"):
        if config[name] % tensor_parallel_size:
            raise ValueError(f"--tensor-parallel-size {tensor_parallel_size} does not divide {name} {config[name]}")
    return shapes


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when all is measured, 1 when nothing could be launched for a shape, 2 without a GPU, or when the
    model cannot be read."""
    options = parse(arguments)
    try:
        shapes = read_shapes(options.model, options.tensor_parallel_size)
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        facts = device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        for shape in shapes:
            sizes = [len(search_space(m, shape, facts)) for m in options.batch_size]
            print(f"N={shape.n} K={shape.k}: {sum(sizes)} configurations for {len(sizes)} numbers of tokens")
        return 0
    if not torch.cuda.is_available():
        print("tune: torch finds no CUDA device here; run it where the model will be served", file=sys.stderr)
        return 2
    return _tune_all(shapes, options.batch_size, options.save_path)


def _tune_all(shapes: list[Shape], batch_sizes: list[int], folder: Path) -> int:
    name, num_gpus = device_name(), torch.cuda.device_count()
    paths = {shape: folder / config_file_name(shape.n, shape.k, name) for shape in shapes}
    jobs = [(shape, m) for shape in shapes for m in missing_batches(paths[shape], batch_sizes)]
    shares = [
        [job for job in jobs if job[1] in set(batches)] for batches in deal(sorted(batch_sizes, reverse=True), num_gpus)
    ]
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    done: Any = context.Queue()
    workers = [
        context.Process(target=_tune_share, args=(gpu, share, str(folder), done)) for gpu, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    started, finished, ended, failed = time.monotonic(), 0, 0, 0
    while ended < len(workers):
        item = done.get()
        if item is None:
            ended += 1
            continue
        shape, num_tokens, found = item
        finished += 1
        if found is None:
            failed += 1
            outcome = "no configuration could be launched"
        else:
            save(paths[shape], num_tokens, found[0])
            outcome = f"{1e6 * found[1]:.1f} us with {found[0].to_json()}"
        progress = ", ".join(_progress(finished, len(jobs), started))
        print(f"{progress}: N={shape.n} K={shape.k} M={num_tokens}: {outcome}", flush=True)
    for worker in workers:
        worker.join()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
