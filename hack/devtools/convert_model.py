"""Turn a GGUF file into a safetensors model folder (float32), with tokenizer, chat template and generation config.

Why: transformers needs most of a minute to dequantise a GGUF file, safetensors load in under a second; the demo, the
tests and the images all start from the folder. Unlike the rest of this folder it needs torch, transformers, gguf and
accelerate, so it runs as its own process in the project's virtual environment. The tokenizer is the engine's reading of
the file: transformers takes GPT-2's way to split text where the file names another.

    python convert_model.py FOLDER_WITH_GGUF FILE.gguf OUTPUT_FOLDER [--tokenizer-only]
"""

from __future__ import annotations

import sys
from pathlib import Path

from trimtab_engine.text.gguf_tokenizer import read_gguf_tokenizer

TOKENIZER_ONLY = "--tokenizer-only"


def convert(source: Path, gguf_file: str, output: Path) -> None:
    """Write `output`; the weights are the GGUF's own values, dequantised, so both files give the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    # transformers marks what it read from GGUF as quantised and refuses to save it: the dequantised tensors go into
    # a plain model of the same shape. Loading is strict, so a tensor left packed fails here and not in a wrong answer.
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
