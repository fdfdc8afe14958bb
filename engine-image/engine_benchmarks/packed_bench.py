"""Milliseconds per decoded token of one GGUF file: its blocks multiplied in their format, the same model in float32,
and llama.cpp, in one run.

Contenders alternate, after an uncounted round; each one's best round counts, so that other work on the machine favours
none of them. With one thread, processor time is reported too, which other work changes less. llama.cpp is another
Python's cyllama, a wheel on PyPI:

    python -m venv peer && peer/bin/pip install cyllama
    python -m engine_benchmarks.packed_bench MODEL.gguf --plain FOLDER --peer peer/bin/python
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from trimtab_kernels.native.library import NativeUnavailable, native_library

from engine_benchmarks.parity import greedy_generator, load_runner

PROMPT_TOKENS, SHORT, LONG = 16, 1, 33
"""A round generates SHORT and LONG tokens after the prompt: the difference is decoding."""
STEPS = LONG - SHORT
ROUNDS = 5
PEER = """
import sys, time
from cyllama.llama import llama_cpp as llama
llama.llama_backend_init()
llama.ggml_backend_load_all()
model = llama.LlamaModel(sys.argv[1], llama.LlamaModelParams(), verbose=False)
settings = llama.LlamaContextParams()
settings.n_ctx = settings.n_batch = 512
settings.n_threads = settings.n_threads_batch = int(sys.argv[2])
prompt, tokens = [int(word) for word in sys.argv[3].split(",")], int(sys.argv[4])
for line in sys.stdin:
    context = llama.LlamaContext(model, settings, verbose=False)
    context.decode(llama.llama_batch_get_one(prompt))
    context.decode(llama.llama_batch_get_one([1], len(prompt)))
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(tokens):
        context.decode(llama.llama_batch_get_one([100 + step], len(prompt) + 1 + step))
    print("took", time.perf_counter() - wall, time.process_time() - cpu, flush=True)
    context.close()
"""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds."""

    wall: float
    processor: float


NOTHING = Spent(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Timed:
    """One round: the time of the prompt and `STEPS` tokens, and the time of the prompt only."""

    before: Spent
    whole: Spent


Round = Callable[[], Timed]


def of_one_token(rounds: Sequence[Timed]) -> Spent:
    """Return the best total minus the best prompt time. The best difference would be that of the round whose prompt was
    disturbed most, and may be negative.
    """

    def least(read: Callable[[Spent], float]) -> float:
        return (min(read(timed.whole) for timed in rounds) - min(read(timed.before) for timed in rounds)) / STEPS

    return Spent(least(lambda spent: spent.wall), least(lambda spent: spent.processor))


def time_alternately(contenders: Mapping[str, Round], rounds: int) -> dict[str, Spent]:
    """Return each contender's time per token. The first round, with page faults on new memory, is not counted."""
    timed: dict[str, list[Timed]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            timed[name].append(run())
    return {name: of_one_token(all_[1:]) for name, all_ in timed.items()}


def trimtab(model: Path, prompt: list[int], threads: int) -> tuple[Round, int]:
    """Return a round of the engine's model runner, and its weights' bytes."""
    found = native_library()
    if isinstance(found, NativeUnavailable):
        raise typer.BadParameter(f"the operators are not compiled: {found.reason}")
    runner = load_runner(str(model), cpu_threads=threads)
    generate = greedy_generator(runner, block_size=16, batch=1)

    def measured(num_tokens: int) -> Spent:
        wall, processor = time.perf_counter(), time.process_time()
        generate([prompt], num_tokens)
        return Spent(time.perf_counter() - wall, time.process_time() - processor)

    return lambda: Timed(measured(SHORT), measured(LONG)), runner.facts.weights_bytes


@contextmanager
def llama_cpp(python: Path, file: Path, prompt: list[int], threads: int) -> Iterator[Round]:
    """Return a round of llama.cpp, in a separate process that waits meanwhile."""
    words = [str(python), "-c", PEER, str(file), str(threads), ",".join(map(str, prompt)), str(STEPS)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as peer:
        stdin, output = peer.stdin, peer.stdout
        assert stdin is not None
        assert output is not None

        def run() -> Timed:
            print("go", file=stdin, flush=True)
            for line in output:
                if line.startswith("took "):
                    wall, processor = line.split()[1:]
                    return Timed(NOTHING, Spent(float(wall), float(processor)))
            raise RuntimeError(f"llama.cpp ended with {peer.wait()}")

        yield run
        stdin.close()


def main(
    file: Annotated[Path, typer.Argument(help="a .gguf file")],
    plain: Annotated[Path, typer.Option(help="the same model as safetensors, computed in float32")],
    threads: int = 1,
    peer: Annotated[Path | None, typer.Option(help="a Python that has cyllama")] = None,
    rounds: int = ROUNDS,
) -> None:
    """Measure and print JSON."""
    prompt = [(7 * i) % 4000 + 5 for i in range(PROMPT_TOKENS)]
    with ExitStack() as stack:
        contenders: dict[str, Round] = {}
        sizes: dict[str, int] = {}
        for name, model in (("packed", file), ("float32", plain)):
            contenders[name], sizes[name] = trimtab(model, prompt, threads)
        if peer is not None:
            contenders["llama.cpp"] = stack.enter_context(llama_cpp(peer, file, prompt, threads))
        best = time_alternately(contenders, rounds)
    output = {name: {key: round(1e3 * value, 3) for key, value in asdict(of).items()} for name, of in best.items()}
    json.dump({"threads": threads, "ms_per_token": output, "weights_bytes": sizes}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    typer.run(main)
