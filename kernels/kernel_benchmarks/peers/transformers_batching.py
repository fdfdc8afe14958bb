"""transformers' continuous batching: the manager behind `generate_batch`, which itself takes one number of new tokens
for all requests. Attention, CUDA graphs and overlap are its own choices for the installed packages.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kernel_benchmarks.engine_rows import EngineRow, Kind, Workload
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.peers.served import decode_rate, model_folder, temperature_of

POLL_SECONDS = 1.0
STOP_SECONDS = 10.0
WARM_UP: Workload = [([5] * 64, 8), ([6] * 64, 8)]


class TransformersBatching:
    """A model with random weights on one device. `config`: further fields of its ContinuousBatchingConfig."""

    def __init__(self, shape: ModelShape, folder: Path, *, device: str = "cuda", **config: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.from_pretrained(model_folder(shape, folder, with_tokenizer=False))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            make: Any = AutoModelForCausalLM.from_config
            self.model = make(settings, dtype=dtype, attn_implementation="sdpa").eval()
        self._config = config

    def rate(self, row: EngineRow) -> float:
        """See Served. A first, small load compiles and captures everything lazy."""
        self.generate(WARM_UP, temperature=temperature_of(row))
        started, outputs = self.generate(row.load, temperature=temperature_of(row))
        times: list[list[float]] = [output.timestamps for output in outputs]
        if row.kind is Kind.DECODE:
            return decode_rate(times)
        seconds: float = max(stamps[-1] for stamps in times) - started
        if row.kind is Kind.PREFILL:
            return sum(len(prompt) for prompt, _ in row.load) / seconds
        return sum(count for _, count in row.load) / seconds

    def generate(self, load: Workload, *, temperature: float = 0.0) -> tuple[float, list[Any]]:
        """Return (time of the first queued request, outputs in order).

        Raises:
            RuntimeError: a request failed.
        """
        with self._manager(load, temperature) as manager:
            started = time.perf_counter()
            names = [
                manager.add_request(prompt, max_new_tokens=count, record_timestamps=True, eos_token_id=-1)
                for prompt, count in load
            ]
            found: dict[str, Any] = {}
            while len(found) < len(load):
                output = manager.get_result(timeout=POLL_SECONDS)
                if output is not None and output.is_finished():
                    found[output.request_id] = output
                elif output is None and not manager.is_running():
                    raise RuntimeError(f"its generation thread ended with {len(found)} of {len(load)} requests")
        outputs = [found[name] for name in names]
        failed = [output.error for output in outputs if output.error is not None]
        short = [len(o.generated_tokens) for o, (_, count) in zip(outputs, load, strict=True) if o.error is None]
        if failed or short != [count for _, count in load]:
            raise RuntimeError(f"requests failed: {failed[:1] or short[:4]}")
        return started, outputs

    @contextmanager
    def _manager(self, load: Workload, temperature: float) -> Iterator[Any]:
        """Create a manager sized for this load, as `generate_batch` does."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        longest = max(count for _, count in load)
        generation: Any = GenerationConfig
        with self.model.continuous_batching_context_manager(
            generation_config=generation(eos_token_id=-1, pad_token_id=0, max_new_tokens=longest, **sampling),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, **self._config),
            workload_hints=WorkloadHints(max(len(prompt) for prompt, _ in load), longest, len(load)),
            timeout=STOP_SECONDS,
        ) as manager:
            yield manager


def start(shape: ModelShape, folder: Path) -> TransformersBatching:
    return TransformersBatching(shape, folder)
