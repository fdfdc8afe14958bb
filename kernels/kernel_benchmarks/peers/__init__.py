"""Other engines on the engine's rows: same models with random weights, same prompts, same numbers of output tokens.

One file per engine contains its calls; it is imported when it runs. Engines that are not installed, or do not support a
model, are reported as not run, with the reason. Does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kernel_benchmarks.ideal import ModelShape


@dataclass(frozen=True, slots=True)
class Peer:
    """`adapter` is a module here with `start(shape, folder)`. `cannot_serve` returns the reason, or an empty text."""

    name: str
    package: str
    adapter: str
    cannot_serve: Callable[[ModelShape], str]

    def why_not(self, shape: ModelShape) -> str:
        """Return the reason why it does not run here; empty if it does."""
        if find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return self.cannot_serve(shape)


def _anything(shape: ModelShape) -> str:
    return ""


def _nano_vllm(shape: ModelShape) -> str:
    if not shape.qk_norm:
        return "nano-vllm serves Qwen3 only"
    return "" if find_spec("flash_attn") else "flash-attn, which nano-vllm imports, is not installed"


def _mini_sglang(shape: ModelShape) -> str:
    missing = [name for name in ("flashinfer", "sgl_kernel") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)}, which mini-sglang imports, are not installed"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "0"
    newer = tuple(int(part) for part in torch.split("+")[0].split(".")[:2]) >= (2, 10)
    return f"mini-sglang requires torch below 2.10; this is {torch}" if newer else ""


PEERS = (
    Peer("transformers continuous batching", "transformers", "transformers_batching", _anything),
    Peer("nano-vllm", "nanovllm", "nano_vllm", _nano_vllm),
    Peer("mini-sglang", "minisgl", "mini_sglang", _mini_sglang),
)
