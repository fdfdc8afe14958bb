"""A hub repository: two weight shards, text files, and irrelevant files."""

import hashlib
import json
from pathlib import Path

SHARD_BYTES = 300_000
REPO = "org/tiny"


def a_repository(folder: Path, *, seed: int = 0) -> Path:
    """Write two shards, an index, text files, and irrelevant files."""
    folder.mkdir(parents=True)
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, name in enumerate(shards):
        (folder / name).write_bytes(hashlib.shake_128(bytes([seed, number])).digest(SHARD_BYTES))
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "seed": seed}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"x" * SHARD_BYTES)
    return folder
