"""Turn a GGUF file into a safetensors model folder (float32), with tokenizer, chat template and generation config.

Why: transformers needs most of a minute to dequantise a GGUF file, safetensors load in under a second; the demo, the
tests and the images all start from the folder. Unlike the rest of this folder it needs torch, transformers, gguf and
accelerate, so it runs as its own process in the project's virtual environment.

    python convert_model.py FOLDER_WITH_GGUF FILE.gguf OUTPUT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, gguf_file: str, output: Path) -> None:
    """Write `output`; the weights are the GGUF's own values, dequantised, so both files give the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    # transformers marks what it read from GGUF as quantised and refuses to save it: the dequantised tensors go into
    # a plain model of the same shape. Loading is strict, so a tensor left packed fails here and not in a wrong answer.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
