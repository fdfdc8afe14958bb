"""PEFT adapter folders: parsed contents, and rejected ones."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import an_adapter
from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.weights.adapter_files import AdaptedShape, PeftAdapter

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
MODULES = {QUERY: (6, 8), DOWN: (8, 10)}


def opened(folder: Path, **changes: Any) -> PeftAdapter:
    return PeftAdapter(Path(an_adapter(folder / "adapter", MODULES, **changes)))


def test_modules_ranks_and_scales_are_told(tmp_path: Path) -> None:
    adapter = opened(tmp_path, rank=4, alpha=6)
    assert adapter.modules == {QUERY: AdaptedShape(4, 8, 6, 1.5), DOWN: AdaptedShape(4, 10, 8, 1.5)}
    assert (adapter.max_rank, adapter.target_modules) == (4, ("down_proj", "q_proj"))
    down, up = adapter.factors(QUERY)
    assert (down.shape, up.shape) == ((4, 8), (6, 4))


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({"use_rslora": True}, [4.0, 4.0]),  # 8 / sqrt(4)
        ({"alpha_pattern": {"q_proj": 2}}, [0.5, 2.0]),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, [0.5, 2.0]),
        ({"alpha_pattern": {"^q_proj": 2}}, [2.0, 2.0]),  # it begins elsewhere
        ({"alpha_pattern": {"0.self_attn.q_proj": 3, "q_proj": 2}}, [0.75, 2.0]),  # the first that names it
        ({"alpha_pattern": {"proj": 2}}, [2.0, 2.0]),  # no whole word
        ({"alpha_pattern": {r"self_attn\.q_proj": 2}}, [0.5, 2.0]),
        ({"ranks": {QUERY: 2}}, [4.0, 2.0]),
        ({"ranks": {QUERY: 2}, "rank_pattern": {"q_proj": 2}}, [4.0, 2.0]),
    ],
)
def test_scales_are_peft_s(tmp_path: Path, changes: dict[str, Any], scales: list[float]) -> None:
    adapter = opened(tmp_path, rank=4, alpha=8, **changes)
    assert [adapter.modules[module].scale for module in (QUERY, DOWN)] == scales


@pytest.mark.parametrize("prefix", ["model.language_model.layers.", "language_model.model.layers."])
def test_the_text_half_of_a_model_that_sees_is_named_as_ours_is(tmp_path: Path, prefix: str) -> None:
    folder = an_adapter(tmp_path / "adapter", {f"{prefix}3.self_attn.v_proj": (6, 8)})
    assert list(PeftAdapter(Path(folder)).modules) == ["model.layers.3.self_attn.v_proj"]


def test_equal_files_are_one_adapter_and_others_are_another(tmp_path: Path) -> None:
    first = opened(tmp_path / "a", seed=1)
    assert opened(tmp_path / "b", seed=1).digest == first.digest
    assert opened(tmp_path / "c", seed=2).digest != first.digest
    assert opened(tmp_path / "d", seed=1, alpha=9).digest != first.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not supported; built is LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora is True, which is not supported; merge the adapter into the model"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"bias": "all"}, "bias is all"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is pissa_niter_16"),
        ({"alpha_pattern": {r".*\d": 2}}, "alpha_pattern has the pattern '.*.d'; supported are names of modules"),
        ({"alpha_pattern": {"a|b": 2}}, r"alpha_pattern has the pattern 'a\|b'"),
        ({"tensors": {f"base_model.model.{QUERY}.lora_magnitude_vector": torch.ones(6)}}, "has the tensor base_model"),
        ({"tensors": {"base_model.model.lm_head.weight": torch.ones(6, 8)}}, "has the tensor base_model.model.lm_head"),
        ({"tensors": {f"{QUERY}.lora_A.weight": torch.ones(6, 8)}}, "has the tensor model.layers.0"),
    ],
)
def test_adapter_beyond_two_factors_is_rejected(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        opened(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian"},
        {"modules_to_save": []},
        {"layers_to_transform": [0, 1]},
        {"target_modules": "all-linear"},
        {"a_field_of_a_later_peft": {"x": 1}},
        {"lora_bias": None},
    ],
)
def test_adapter_fields_without_effect_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(opened(tmp_path, **changes).modules) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 3}, "rank 3 of model.layers.0.self_attn.q_proj differs from its tensors' \\(4\\)"),
        ({"r": 0}, "r is 0; it must be a number above 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "8"}, "lora_alpha is 8; it must be a number"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"rank_pattern": [1]}, "rank_pattern is no object of numbers by module"),
        ({"rank_pattern": {"q_proj": "4"}}, "q_proj is 4; it must be a number"),
        (
            {"tensors": {"base_model.model.model.norm.lora_A.weight": torch.ones(4, 8)}},
            "of model.norm only one of the two factors",
        ),
        (
            {
                "tensors": {
                    "base_model.model.x.lora_A.weight": torch.ones(4, 8),
                    "base_model.model.x.lora_B.weight": torch.ones(6, 5),
                }
            },
            r"the factors of x are \[4, 8\] and \[6, 5\]; \[rank, in\] and \[out, rank\] are needed",
        ),
        (
            {
                "tensors": {
                    "base_model.model.x.lora_A.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
                    "base_model.model.x.lora_B.weight": torch.ones(6, 4),
                }
            },
            "x.lora_A.weight is F8_E4M3; supported are F32, F16, BF16",
        ),
    ],
)
def test_contradictory_adapter_is_rejected_with_its_file(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, **changes)


def test_a_pickle_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(NotSupportedError, match=r"its tensors are in adapter_model.bin, a pickle, which can run code"):
        PeftAdapter(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"adapter {folder}: no {name} in it"):
        PeftAdapter(folder)


def test_a_folder_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no folder here; give one with adapter_config.json"):
        PeftAdapter(tmp_path / "nowhere")


@pytest.mark.parametrize(("cut", "message"), [(-8, "is truncated"), (4, "is truncated or no safetensors file")])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int, message: str) -> None:
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelError, match=message):
        PeftAdapter(folder)


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="holds no JSON object"):
        PeftAdapter(folder)


def test_an_adapter_of_nothing_is_refused(tmp_path: Path) -> None:
    folder = an_adapter(tmp_path / "adapter", {})
    with pytest.raises(ModelError, match="holds no tensors of an adapter"):
        PeftAdapter(Path(folder))


NESTED = "[" * 50_000 + "]" * 50_000


def with_header(folder: Path, header: str) -> Path:
    """Replace the tensors with a file of this header and 64 bytes of data."""
    data = header.encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(64))
    return folder


@pytest.mark.parametrize(
    "header",
    [
        '{"a":' + NESTED + "}",
        '{"a":{"dtype":"F32","shape":[1e999,2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":"12","data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":[],"shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":{"x":1,"y":2}}}',
        "[]",
    ],
    ids=["nested", "infinite", "text", "boolean", "negative", "list dtype", "object offsets", "list"],
)
def test_header_of_wrong_types_is_rejected(tmp_path: Path, header: str) -> None:
    folder = with_header(Path(an_adapter(tmp_path / "adapter", MODULES)), header)
    with pytest.raises(ModelError, match="the safetensors header is damaged"):
        PeftAdapter(folder)


def test_nested_configuration_is_rejected(tmp_path: Path) -> None:
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    (folder / "adapter_config.json").write_text('{"r":' + NESTED + "}")
    with pytest.raises(ModelError, match="is not JSON"):
        PeftAdapter(folder)


def test_adapter_path_beyond_name_limit_is_rejected() -> None:
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        PeftAdapter(Path("/" + "a" * 300))


@pytest.mark.parametrize("name", ["is_dir", "exists", "read_bytes"])
def test_unreadable_adapter_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tests may run as root, which can enter any folder: the error is raised instead."""
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))

    def denied(self: Path, **_: Any) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, name, denied)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        PeftAdapter(folder)


def test_adapter_file_that_is_a_pipe_is_rejected(tmp_path: Path) -> None:
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    with pytest.raises(ModelError, match=r"no adapter_config\.json in it"):
        PeftAdapter(folder)


def test_mutated_adapter_files_raise_model_errors_only(tmp_path: Path) -> None:
    """Random replacements of values and bytes in both files; most of them are damage."""
    folder = Path(an_adapter(tmp_path / "adapter", MODULES))
    config, tensors = ((folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    length = struct.unpack("<Q", tensors[:8])[0]
    header = json.loads(tensors[8 : 8 + length])
    values: list[Any] = [None, True, -1, 0, 1e999, 2**70, "", "^", "F32", [], [[]], {}, {"": 1}, [1, 2, 3], [0, 2**63]]
    draw = random.Random(34)
    rejected = 0
    for _ in range(600):
        words, entries = json.loads(config), json.loads(json.dumps(header))
        if draw.random() < 0.5:
            words[draw.choice([*words, "rank_pattern", "alpha_pattern"])] = draw.choice(values)
        else:
            entry = entries[draw.choice(list(entries))]
            if isinstance(entry, dict) and "dtype" in entry:
                entry[draw.choice(list(entry))] = draw.choice(values)
        raw = bytearray(json.dumps(entries).encode())
        if draw.random() < 0.3:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        (folder / "adapter_config.json").write_text(json.dumps(words))
        body = struct.pack("<Q", len(raw)) + bytes(raw) + tensors[8 + length :]
        (folder / "adapter_model.safetensors").write_bytes(body)
        try:
            PeftAdapter(folder)
        except (ModelError, NotSupportedError):
            rejected += 1
    assert rejected > 200
