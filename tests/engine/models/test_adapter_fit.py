"""Adapters that fit a model, and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_folders import an_adapter
from trimtab_engine.errors import ConfigError
from trimtab_engine.models.adapter_fit import check_fit
from trimtab_engine.weights.adapter_files import PeftAdapter
from trimtab_modelspec.tensors import StoredTensor

QUERY, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.1.up_proj"
TENSORS = {
    f"{QUERY}.weight": StoredTensor((6, 8), "attention"),
    f"{EXPERT}.weight": StoredTensor((4, 8), "experts"),
    "model.embed_tokens.weight": StoredTensor((97, 8), "embedding"),
    "lm_head.weight": StoredTensor((97, 8), "lm_head"),
}


def check(folder: Path, modules: dict[str, tuple[int, int]], max_rank: int = 16, **changes: Any) -> None:
    check_fit("sql", PeftAdapter(Path(an_adapter(folder / "a", modules, **changes))), TENSORS, max_rank)


@pytest.mark.parametrize("targets", [["q_proj"], [QUERY], "all-linear", ["self_attn.q_proj", "embed_tokens"]])
def test_adapter_with_known_modules_fits(tmp_path: Path, targets: Any) -> None:
    check(tmp_path, {QUERY: (6, 8)}, 4, target_modules=targets)


@pytest.mark.parametrize(
    ("modules", "changes", "message"),
    [
        (
            {"model.layers.7.self_attn.q_proj": (6, 8)},
            {},
            "it adapts model.layers.7.self_attn.q_proj, which this model",
        ),
        ({QUERY: (6, 9)}, {}, r"q_proj is \[6, 9\], the model's is \[6, 8\]; serve it with the model that it was"),
        ({QUERY: (6, 8)}, {"rank": 17}, "its rank is 17, above --max-lora-rank 16; raise that to 17"),
        ({QUERY: (6, 8)}, {"target_modules": ["q_proj", "c_attn"]}, "has c_attn, which is not a module of"),
        ({QUERY: (6, 8)}, {"target_modules": ["proj"]}, "target_modules has proj, which is not a module of"),
        ({EXPERT: (4, 8)}, {}, "adapters of experts of an MoE are not supported; merge it into the model"),
        ({"lm_head": (97, 8)}, {}, "adapters of the output layer are not supported"),
        ({"model.embed_tokens": (97, 8)}, {}, "adapters of the embeddings are not supported"),
    ],
)
def test_adapter_mismatch_is_rejected_with_reason(
    tmp_path: Path, modules: dict[str, tuple[int, int]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"adapter sql .*{message}"):
        check(tmp_path, modules, **changes)
