"""Measurement of w8a8_block_fp8's launch configurations for a model's shapes on the GPUs present.

`python -m trimtab_kernels.tune MODEL_FOLDER [--tensor-parallel-size 8] [--batch-size 1 64 …] [--save-path FOLDER]`

The shapes are read from the model's config.json: the projections of attention and MLP of one rank of the
tensor-parallel group. For every shape and number of tokens, each configuration of a pruned grid is timed; the best ones
are written to one file per shape and GPU name (gemm_config) after each number of tokens, so that an interrupted run can
be resumed. With several GPUs, the numbers of tokens are distributed over them.

With `--budget-seconds`, every shape gets its share of the time: its configurations are compiled by many processes for
the larger part of it, in random order after the default, and those that were compiled are timed.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.gemm_config import CONFIG_FOLDER, GemmConfig, config_file_name, device_name
from trimtab_kernels.launch.jit import cdiv
from trimtab_kernels.tune.captured import copies_needed, seconds_in_graph
from trimtab_kernels.tune.compile_ahead import CompileAhead, compile_launches, processes_per_gpu
from trimtab_kernels.tune.gemm_search import Shape, search_space, shapes_of, shuffle_configs
from trimtab_kernels.w8a8_block_fp8 import quantize_groups_triton, w8a8_block_fp8_reference, w8a8_block_fp8_triton

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
POLL_SECONDS = 1.0
COMPILE_SHARE = 0.6
"""Fraction of a shape's time for compilation: a configuration takes a second or two to compile, in one of many
processes, and 10 ms to time."""
RELATIVE_ERROR = 2**-6
"""Tolerance relative to the largest value: bf16 rounds to 2**-8; a faulty configuration is off by far more."""


def missing_batches(path: Path, batch_sizes: list[int]) -> list[int]:
    """Return the numbers of tokens that no earlier run has measured."""
    done = json.loads(path.read_text()) if path.exists() else {}
    return [m for m in batch_sizes if str(m) not in done]


def save(path: Path, num_tokens: int, config: GemmConfig) -> None:
    """Add one entry, in the order of M. The file is replaced atomically."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[str(num_tokens)] = config.to_json()
    ordered = {m: entries[m] for m in sorted(entries, key=int)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(ordered, indent=4) + "\n")
    temporary.replace(path)


def distribute(batch_sizes: list[int], num_gpus: int) -> list[list[int]]:
    """Distribute the numbers of tokens over the GPUs, large and small ones evenly: large ones take longest."""
    return [batch_sizes[index::num_gpus] for index in range(num_gpus)]


def best_of(
    candidates: Iterable[GemmConfig], seconds: Callable[[GemmConfig], float | None]
) -> tuple[GemmConfig, float] | None:
    """Return the fastest candidate, or None if there is none; seconds are None for a candidate that cannot be launched
    or is wrong.
    """
    best: tuple[GemmConfig, float] | None = None
    for config in candidates:
        taken = seconds(config)
        if taken is not None and (best is None or taken < best[1]):
            best = config, taken
    return best


def until(deadline: float, configs: list[GemmConfig]) -> Iterator[GemmConfig]:
    """Yield the first configuration always, the others while there is time."""
    yield from configs[:1]
    for config in configs[1:]:
        if time.monotonic() >= deadline:
            return
        yield config


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of one GEMM: the activations, and several copies of the weights (see captured.py)."""

    a: torch.Tensor
    a_scales: torch.Tensor
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def call(self, config: GemmConfig, copy: int = 0) -> torch.Tensor:
        """Return [num_tokens, N] bf16."""
        b, b_scales = self.weights[copy]
        return w8a8_block_fp8_triton(self.a, self.a_scales, b, b_scales, torch.bfloat16, config=config)


def _measure(config: GemmConfig, operands: Operands, expected: torch.Tensor) -> float | None:
    """Return seconds per GEMM; None if it cannot be launched or is wrong."""
    try:
        found = operands.call(config)
        torch.cuda.synchronize()
        if float((found.float() - expected).abs().max()) > RELATIVE_ERROR * float(expected.abs().max()):
            print(f"skipped {config}: its result is wrong", file=sys.stderr)
            return None
        return seconds_in_graph([partial(operands.call, config, copy) for copy in range(len(operands.weights))])
    except Exception as error:  # Triton raises its own, ptxas and driver errors of many types
        if "out of resource" not in str(error).lower() and "OutOfResources" not in type(error).__name__:
            print(f"skipped {config}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None


def _compile(case: tuple[Shape, GemmConfig]) -> None:
    """Compile one configuration into Triton's cache; it does not depend on the number of tokens."""
    shape, config = case
    empty = partial(torch.empty, device="meta")
    groups = cdiv(shape.k, 128)
    a, b = (empty(rows, shape.k, dtype=torch.float8_e4m3fn) for rows in (config.block_m, shape.n))
    scales = empty(config.block_m, groups), empty(cdiv(shape.n, 128), groups)
    compile_launches(lambda: w8a8_block_fp8_triton(a, scales[0], b, scales[1], torch.bfloat16, config=config))


def _candidates(
    ahead: CompileAhead, shape: Shape, batches: list[int], facts: DeviceFacts, seconds: float
) -> dict[int, list[GemmConfig]]:
    """Return the candidates for each number of tokens: the part of its search space that could be compiled in the
    time.
    """
    spaces = {m: search_space(m, shape, facts) for m in batches}
    wanted = shuffle_configs(list(dict.fromkeys(config for space in spaces.values() for config in space)))
    defaults = [space[0] for space in spaces.values()]
    first = list(dict.fromkeys([*defaults, *wanted]))
    compiled = {config for _, config in ahead.run(_compile, [(shape, config) for config in first], seconds)}
    return {m: [space[0], *(c for c in space[1:] if c in compiled)] for m, space in spaces.items()}


def _tune_share(gpu: int, jobs: list[tuple[Shape, int]], seconds: float, processes: int, done: Any) -> None:
    """Time the jobs of one GPU, in a separate process, and report each as (shape, tokens, config, seconds)."""
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    facts = device_facts(device)
    ahead = CompileAhead(gpu, processes)
    by_shape = [(shape, [m for _, m in group]) for shape, group in itertools.groupby(jobs, key=lambda job: job[0])]
    end = time.monotonic() + seconds
    for number, (shape, batches) in enumerate(by_shape):
        own = (end - time.monotonic()) / (len(by_shape) - number)
        if own <= 0:
            break
        candidates = _candidates(ahead, shape, batches, facts, COMPILE_SHARE * own)
        timing = (end - time.monotonic()) / (len(by_shape) - number) / len(batches)
        for num_tokens in batches:
            found = _time(shape, num_tokens, candidates[num_tokens], device, time.monotonic() + timing)
            done.put((shape, num_tokens, found))
    ahead.close()


def _time(
    shape: Shape, num_tokens: int, configs: list[GemmConfig], device: torch.device, deadline: float
) -> tuple[GemmConfig, float] | None:
    a, a_scales = quantize_groups_triton(torch.randn(num_tokens, shape.k, device=device))
    b = torch.randn(shape.n, shape.k, device=device).to(torch.float8_e4m3fn)
    b_scales = torch.rand(cdiv(shape.n, 128), cdiv(shape.k, 128), device=device) + 0.5
    expected = w8a8_block_fp8_reference(a, a_scales, b, b_scales, torch.float32)
    weights = [(b, b_scales), *((b.clone(), b_scales.clone()) for _ in range(copies_needed(b.numel()) - 1))]
    operands = Operands(a, a_scales, weights)
    return best_of(until(deadline, configs), lambda config: _measure(config, operands, expected))


def _progress(done: int, total: int, started: float) -> Iterator[str]:
    elapsed = time.monotonic() - started
    yield f"[{done}/{total}] {elapsed:.0f} s"
    if done:
        yield f"about {math.ceil(elapsed / done * (total - done))} s left"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
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
        help="output folder, one file per shape and GPU name; entries in them are not measured again (default: the "
        "package's own folder, where the engine looks)",
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=math.inf, metavar="N", help="stop after this time; the next run resumes"
    )
    parser.add_argument("--dry-run", action="store_true", help="print shapes and sizes of the search, and end; no GPU")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def read_shapes(model: Path, tensor_parallel_size: int) -> list[Shape]:
    """Return the shapes of the model at this path.

    Raises:
        ValueError: the model cannot be read; the message names the cause.
    """
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
    """Return exit code 0 if all is measured, 1 if nothing could be launched for a shape, 2 without a GPU or if the
    model cannot be read, 3 if time ran out.
    """
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
    return _tune_all(shapes, options.batch_size, options.save_path, options.budget_seconds)


def _tune_all(shapes: list[Shape], batch_sizes: list[int], folder: Path, seconds: float) -> int:
    name, num_gpus = device_name(), torch.cuda.device_count()
    paths = {shape: folder / config_file_name(shape.n, shape.k, name) for shape in shapes}
    jobs = [(shape, m) for shape in shapes for m in missing_batches(paths[shape], batch_sizes)]
    shares = [
        [job for job in jobs if job[1] in set(batches)]
        for batches in distribute(sorted(batch_sizes, reverse=True), num_gpus)
    ]
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    done: Any = context.Queue()
    processes = processes_per_gpu(num_gpus)
    workers = [
        context.Process(target=_tune_share, args=(gpu, share, seconds, processes, done))
        for gpu, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    started, finished, failed = time.monotonic(), 0, 0
    for shape, num_tokens, found in _results(workers, done):
        finished += 1
        if found is None:
            failed += 1
            outcome = "no configuration could be launched"
        else:
            save(paths[shape], num_tokens, found[0])
            outcome = f"{1e6 * found[1]:.1f} us with {found[0].to_json()}"
        progress = ", ".join(_progress(finished, len(jobs), started))
        print(f"{progress}: N={shape.n} K={shape.k} M={num_tokens}: {outcome}", flush=True)
    if any(worker.exitcode for worker in workers):
        print("a process ended with an error, see above; run it again to measure the rest", file=sys.stderr)
        return 1
    if finished < len(jobs):
        print(f"out of time: {len(jobs) - finished} numbers of tokens are left; run the same command again", flush=True)
        return 3
    return 1 if failed else 0


def _results(workers: list[Any], done: Any) -> Iterator[tuple[Shape, int, tuple[GemmConfig, float] | None]]:
    """Yield the workers' reports until all of them have ended, successfully or not."""
    while any(worker.is_alive() for worker in workers) or not done.empty():
        try:
            yield done.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
    for worker in workers:
        worker.join()
