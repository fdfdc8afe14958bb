"""The interface of every peer, and shared helpers: a folder with a model's configuration, rates from timestamps."""

import json
from pathlib import Path
from typing import Protocol

from kernel_benchmarks.engine_rows import EngineRow, Kind
from kernel_benchmarks.ideal import ModelShape

MAX_POSITIONS = 4096
WORKLOAD_TEMPERATURE = 0.6  # nano-vllm's benchmark; decode and prefill rows are greedy, like ours

UNKNOWN, PAD, END = "<unk>", "<pad>", "</s>"
SPECIAL = {UNKNOWN: 0, PAD: 1, END: 2}


class Served(Protocol):
    """A peer with a loaded model."""

    def rate(self, row: EngineRow) -> float:
        """Return tokens/s, measured like ours: of decodes once all of them run, of prompts, of a workload's output."""


def temperature_of(row: EngineRow) -> float:
    return WORKLOAD_TEMPERATURE if row.kind is Kind.WORKLOAD else 0.0


def model_folder(shape: ModelShape, folder: Path, *, with_tokenizer: bool) -> Path:
    """Write config.json and, if requested, an unused tokenizer: prompts are token ids."""
    (folder / "config.json").write_text(json.dumps(shape.config(MAX_POSITIONS)))
    if with_tokenizer:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        plain = Tokenizer(models.WordLevel(SPECIAL, unk_token=UNKNOWN))
        names = {"unk_token": UNKNOWN, "pad_token": PAD, "eos_token": END}
        PreTrainedTokenizerFast(tokenizer_object=plain, **names).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def decode_rate(timestamps: list[list[float]]) -> float:
    """Return the tokens/s between the time when every request has a token and the time when the first one ends."""
    first, last = max(times[0] for times in timestamps), min(times[-1] for times in timestamps)
    inside = sum(first < time <= last for times in timestamps for time in times)
    if inside <= 0 or last <= first:
        raise RuntimeError("some request ended before all of them decoded")
    return inside / (last - first)
