"""Write tests/golden/compressed_tensors.safetensors: small weights stored and restored by compressed-tensors.

Run it where that package is installed; the tests do not need it:

    python tests/engine/fakes/compressed_tensors_golden.py
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[2] / "golden" / "compressed_tensors.safetensors"
OUT, SIZE = 16, 64
FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
SMALL: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float by tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}),
    "float by channel": ("float-quantized", FLOAT | {"strategy": "channel"}),
    "float by block": ("naive-quantized", FLOAT | {"strategy": "block", "block_structure": [8, 32]}),
    "int by tensor": ("int-quantized", INT | {"strategy": "tensor"}),
    "int by channel": ("int-quantized", INT | {"strategy": "channel"}),
    "int by channel, with zero points": ("int-quantized", INT | {"strategy": "channel", "symmetric": False}),
    "int by group": ("naive-quantized", INT | {"strategy": "group", "group_size": 32}),
    "packed, 8 bits by channel": ("pack-quantized", INT | {"strategy": "channel"}),
    "packed, 8 bits by group, with zero points": (
        "pack-quantized",
        INT | {"strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "packed, 4 bits by channel": ("pack-quantized", SMALL | {"strategy": "channel"}),
    "packed, 4 bits by group": ("pack-quantized", SMALL | {"strategy": "group", "group_size": 32}),
    "packed, 4 bits by group, with zero points": (
        "pack-quantized",
        SMALL | {"strategy": "group", "group_size": 32, "symmetric": False},
    ),
}


def shape_of_scales(weights: dict[str, Any]) -> tuple[int, ...]:
    rows, columns = weights.get("block_structure", (1, 0))
    return {
        "tensor": (1,),
        "channel": (OUT, 1),
        "group": (OUT, SIZE // weights.get("group_size", SIZE)),
        "block": (OUT // rows, SIZE // (columns or SIZE)),
    }[weights["strategy"]]


def write() -> None:
    """All cases, in the dtypes that the package stores."""
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    package = importlib.import_module("compressed_tensors")
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, torch.Tensor] = {}
    for name, (storage, weights) in CASES.items():
        scheme = quantization.QuantizationScheme(
            targets=["Linear"], weights=quantization.QuantizationArgs(**weights), format=storage
        )
        compressor = compressors.BaseCompressor.get_value_from_registry(storage)
        most = {("float", 8): 448.0, ("int", 8): 127.0, ("int", 4): 7.0}[weights["type"], weights["num_bits"]]
        shape = shape_of_scales(weights)
        scales = (torch.rand(shape, generator=generator) + 1) * 2 / most
        held = {"weight": torch.randn(OUT, SIZE, generator=generator), "weight_scale": scales.bfloat16().float()}
        if not weights["symmetric"]:
            held["weight_zero_point"] = torch.randint(-6, 7, shape, generator=generator).to(torch.int8)
        stored = compressor.compress(held, scheme)
        restored = compressor.decompress(stored, scheme)["weight"]
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in stored.items()}
        tensors[f"{name}/restored"] = restored.float().contiguous()
    metadata = {
        "made_by": f"tests/engine/fakes/compressed_tensors_golden.py, compressed-tensors {package.__version__}",
        "cases": json.dumps({name: {"format": storage, "weights": w} for name, (storage, w) in CASES.items()}),
    }
    save_file(tensors, GOLDEN, metadata)


if __name__ == "__main__":
    write()
