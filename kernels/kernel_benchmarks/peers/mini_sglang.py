"""mini-sglang's offline engine, with its benchmark's settings and its own random weights."""

import time
from pathlib import Path

from minisgl.core import SamplingParams  # type: ignore[import-not-found]  # installed where it runs
from minisgl.llm import LLM  # type: ignore[import-not-found]

from kernel_benchmarks.engine_rows import EngineRow, Kind, Workload
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.peers.served import MAX_POSITIONS, model_folder, temperature_of

EXTEND_TOKENS, PAGE_SIZE, GRAPH_BATCH = 16384, 256, 256
"""Its benchmark's settings."""


class MiniSglang:
    """It supports only whole runs, so decode is the difference of two runs."""

    def __init__(self, shape: ModelShape, folder: Path) -> None:
        self._llm = LLM(
            str(model_folder(shape, folder, with_tokenizer=True)),
            max_seq_len_override=MAX_POSITIONS,
            max_extend_tokens=EXTEND_TOKENS,
            cuda_graph_max_bs=GRAPH_BATCH,
            page_size=PAGE_SIZE,
            use_dummy_weight=True,
        )
        self._seconds([([5] * 64, 8)], 0.0)

    def rate(self, row: EngineRow) -> float:
        """See Served."""
        temperature = temperature_of(row)
        if row.kind is Kind.DECODE:
            short = [(prompt, 1) for prompt, _ in row.load]
            more = sum(count - 1 for _, count in row.load)
            return more / (self._seconds(row.load, temperature) - self._seconds(short, temperature))
        tokens = (len(prompt) if row.kind is Kind.PREFILL else count for prompt, count in row.load)
        return sum(tokens) / self._seconds(row.load, temperature)

    def _seconds(self, load: Workload, temperature: float) -> float:
        sampling = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count) for _, count in load]
        started = time.perf_counter()
        self._llm.generate([prompt for prompt, _ in load], sampling)
        return time.perf_counter() - started


def start(shape: ModelShape, folder: Path) -> MiniSglang:
    return MiniSglang(shape, folder)
