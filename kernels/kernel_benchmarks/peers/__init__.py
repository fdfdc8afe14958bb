"""Other engines beside the engine's rows: same models with random weights, same prompts, same numbers of tokens out.

One file per engine says how it is called; it is imported when it runs. What is not installed, or serves no such model,
is reported as not run, with the reason. No torch here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kernel_benchmarks.ideal import ModelShape


@dataclass(frozen=True, slots=True)
class Peer:
    """`adapter` is a module here with `start(shape, folder)`. `cannot_serve` says why not, or nothing."""

    name: str
    package: str
    adapter: str
    cannot_serve: Callable[[ModelShape], str]

    def why_not(self, shape: ModelShape) -> str:
        """Why it does not run here; empty where it does."""
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
    return f"mini-sglang asks for torch below 2.10; this is {torch}" if newer else ""


PEERS = (
    Peer("transformers continuous batching", "transformers", "transformers_batching", _anything),
    Peer("nano-vllm", "nanovllm", "nano_vllm", _nano_vllm),
    Peer("mini-sglang", "minisgl", "mini_sglang", _mini_sglang),
)
