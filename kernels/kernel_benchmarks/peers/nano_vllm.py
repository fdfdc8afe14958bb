"""nano-vllm, stepped as by its own `generate`."""

import time
from pathlib import Path

import torch
from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]  # installed where it runs

from kernel_benchmarks.engine_rows import STEPS, WARM_UP_STEPS, EngineRow, Kind, Workload
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.peers.served import MAX_POSITIONS, model_folder

TEMPERATURE = 0.6  # it rejects greedy sampling
WEIGHT_SCALE = 0.02


class NanoVllm:
    """With its benchmark's settings. Without a checkpoint its weights are uninitialised memory, so they are drawn
    here.
    """

    def __init__(self, shape: ModelShape, folder: Path) -> None:
        path = model_folder(shape, folder, with_tokenizer=True)
        self._llm = LLM(str(path), enforce_eager=False, max_model_len=MAX_POSITIONS)
        with torch.no_grad():
            for weights in self._llm.model_runner.model.parameters():
                weights.normal_(std=WEIGHT_SCALE)
        self._run([([5] * 64, 8)])

    def rate(self, row: EngineRow) -> float:
        """See Served. A step returns its number of prompt tokens, or, negative, the number of decoded sequences."""
        if row.kind is Kind.DECODE:
            return self._decode_rate(row)
        seconds = self._run(row.load)
        tokens = (len(prompt) if row.kind is Kind.PREFILL else count for prompt, count in row.load)
        return sum(tokens) / seconds

    def _run(self, load: Workload) -> float:
        self._add(load)
        started = time.perf_counter()
        while not self._llm.is_finished():
            self._llm.step()
        return time.perf_counter() - started

    def _add(self, load: Workload) -> None:
        for prompt, count in load:
            self._llm.add_request(prompt, SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count))

    def _decode_rate(self, row: EngineRow) -> float:
        self._add(row.load)
        decodes = 0
        while decodes < WARM_UP_STEPS:
            decodes = decodes + 1 if self._llm.step()[1] == -row.batch else 0
        started = time.perf_counter()
        for _ in range(STEPS):
            self._llm.step()
        seconds = time.perf_counter() - started
        while not self._llm.is_finished():
            self._llm.step()
        return row.batch * STEPS / seconds


def start(shape: ModelShape, folder: Path) -> NanoVllm:
    return NanoVllm(shape, folder)
