"""Convert a GGUF file to a safetensors model folder (float32), with tokenizer, chat template and generation config.

transformers needs most of a minute to dequantize a GGUF file, while safetensors load in under a second; the demo, the
tests and the images all use the folder. Unlike the rest of this package it needs torch, transformers, gguf and
accelerate, so it runs as a separate process in the project's virtual environment. The engine's own reader creates the
tokenizer, since transformers always splits text as GPT-2 does, even if the file names another pre-tokenizer.

    python convert_model.py FOLDER_WITH_GGUF FILE.gguf OUTPUT_FOLDER [--tokenizer-only]
"""

from __future__ import annotations

import sys
from pathlib import Path

from trimtab_engine.text.gguf_tokenizer import read_gguf_tokenizer

TOKENIZER_ONLY = "--tokenizer-only"


def convert(source: Path, gguf_file: str, output: Path) -> None:
    """Write `output` with the GGUF's dequantized weights, so that both give the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    # transformers marks models read from GGUF as quantized and refuses to save them, so the dequantized tensors are
    # copied to a plain model of the same shape. Loading is strict, so that a tensor left packed fails here.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(output)


def convert_tokenizer(gguf: Path, output: Path) -> None:
    """Write the tokenizer and its chat template to `output`."""
    read_gguf_tokenizer(gguf).save_pretrained(output)


if __name__ == "__main__":
    folder, name, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if TOKENIZER_ONLY not in sys.argv[4:]:
        convert(folder, name, target)
    convert_tokenizer(folder / name, target)
