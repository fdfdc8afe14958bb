"""Generator of a Llama checkpoint with random bfloat16 weights and a given size, in several files, for loading_bench.

python -m engine_benchmarks.random_checkpoint FOLDER --gigabytes 1.5
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config

NUM_FILES = 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
SIGN_AND_FRACTION, EXPONENT = 0x807F - (1 << 16), 0x3C00  # of numbers from 2^-7 to 2^-6, of both signs


def shapes_of(num_layers: int) -> dict[str, tuple[int, ...]]:
    return expected_shapes(parse_model_config(CONFIG | {"num_hidden_layers": num_layers}, {}, "config.json"))


def num_bytes(num_layers: int) -> int:
    """Return the checkpoint's bytes."""
    return 2 * sum(math.prod(shape) for shape in shapes_of(num_layers).values())


def layers_for(gigabytes: float) -> int:
    """Return the number of layers for about this size."""
    each = num_bytes(2) - num_bytes(1)
    return max(1, 1 + round((gigabytes * 1e9 - num_bytes(1)) / each))


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random bits, which are fast to generate and incompressible."""
    bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    return bits.bitwise_and_(SIGN_AND_FRACTION).bitwise_or_(EXPONENT).view(torch.bfloat16)


def write(folder: Path, num_layers: int) -> None:
    """Write the checkpoint, with names in the order of its layers, as other tools do."""
    folder.mkdir(parents=True)
    shapes, generator = shapes_of(num_layers), torch.Generator().manual_seed(0)
    names = list(shapes)
    for number in range(NUM_FILES):
        own = names[number * len(names) // NUM_FILES : (number + 1) * len(names) // NUM_FILES]
        tensors = {name: random_tensor(shapes[name], generator) for name in own}
        save_file(tensors, folder / f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))


def main(folder: Annotated[Path, typer.Argument(help="is made")], gigabytes: float = 1.5) -> None:
    """Write one model."""
    write(folder, layers_for(gigabytes))


if __name__ == "__main__":
    typer.run(main)
