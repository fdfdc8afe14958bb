"""The Trimtab engine: an LLM server whose memory and batch knobs are live.

`from trimtab_engine import LLM, SamplingParams` runs the engine in this process (docs/guides/offline.md). All names are
imported when they are first asked for: importing the package alone stays cheap, and never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab_engine.config.graphs import (
        CompilationConfig,
        CompilationLevel,
        CompilationMode,
        CUDAGraphMode,
    )
    from trimtab_engine.offline.adapters import LoRARequest
    from trimtab_engine.offline.embeddings import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
    from trimtab_engine.offline.llm import LLM
    from trimtab_engine.offline.outputs import CompletionOutput, RequestOutput
    from trimtab_engine.offline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CUDAGraphMode",
    "CompilationConfig",
    "CompilationLevel",
    "CompilationMode",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
]

_HOME = {
    "LLM": "offline.llm",
    "LoRARequest": "offline.adapters",
    "SamplingParams": "offline.sampling_params",
    "RequestOutput": "offline.outputs",
    "CompletionOutput": "offline.outputs",
    "EmbeddingOutput": "offline.embeddings",
    "EmbeddingRequestOutput": "offline.embeddings",
    "PoolingParams": "offline.embeddings",
    "CUDAGraphMode": "config.graphs",
    "CompilationConfig": "config.graphs",
    "CompilationLevel": "config.graphs",
    "CompilationMode": "config.graphs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trimtab_engine' has no attribute {name!r}")
    return getattr(import_module(f"trimtab_engine.{_HOME[name]}"), name)
