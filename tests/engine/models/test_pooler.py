"""Embedding checkpoints: pooling configuration in their files, and decoders without an output layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_builders
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3Model
from trimtab_engine.config.pooling import CheckpointPooling, PoolerConfig
from trimtab_engine.core.startup import start_engine
from trimtab_engine.errors import ConfigError, ModelError, NotSupportedError
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.pooler import pooling_of_checkpoint
from trimtab_engine.scheduling.sampling import Sampling

TYPES = "sentence_transformers.models."
PROMPT = [5, 17, 3, 80, 2, 61, 44, 9, 9, 31, 1]
FALSE = {f"pooling_mode_{mode}": False for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}


def say(folder: Path, *modules: str, **pooling: Any) -> None:
    """Write modules.json and the Pooling module's config.json, as sentence-transformers does."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    entries = [{"idx": i, "name": str(i), "path": paths[name], "type": TYPES + name} for i, name in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    words = {"word_embedding_dimension": 64, **FALSE, "include_prompt": True, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(words))


def test_a_folder_that_says_nothing_is_pooled_as_decoders_are(tmp_path: Path) -> None:
    assert pooling_of_checkpoint(tmp_path) == CheckpointPooling("LAST", normalize=True, where=None)
    (tmp_path / "model.gguf").touch()
    assert pooling_of_checkpoint(tmp_path / "model.gguf") == CheckpointPooling()


@pytest.mark.parametrize(
    ("modules", "pooling", "method", "normalize"),
    [
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, "LAST", True),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True}, "MEAN", False),
        (("Transformer", "Pooling"), {"pooling_mode": "lasttoken"}, "LAST", False),
        (("Transformer", "Pooling"), {"pooling_mode": ["mean"]}, "MEAN", False),
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_cls_token": True}, "CLS", True),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "max_tokens", False),
    ],
)
def test_the_pooling_module_says_how_and_a_normalize_module_whether(
    tmp_path: Path, modules: tuple[str, ...], pooling: dict[str, Any], method: str, normalize: bool
) -> None:
    say(tmp_path, *modules, **pooling)
    assert pooling_of_checkpoint(tmp_path) == CheckpointPooling(method, normalize, str(tmp_path / "modules.json"))


@pytest.mark.parametrize(
    ("modules", "pooling", "wrong"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "a module Dense after the model is"),
        (("Transformer", "Pooling"), {}, "names 0 pooling modes"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "names 2 pooling modes; one is built",
        ),
        (("Transformer", "Pooling"), {"pooling_mode_lasttoken": True, "include_prompt": False}, "include_prompt false"),
    ],
)
def test_unsupported_pooling_modules_are_rejected(
    tmp_path: Path, modules: tuple[str, ...], pooling: dict[str, Any], wrong: str
) -> None:
    say(tmp_path, *modules, **pooling)
    with pytest.raises(NotSupportedError, match=wrong):
        pooling_of_checkpoint(tmp_path)


def test_missing_pooling_folder_can_be_replaced_by_flag(tmp_path: Path) -> None:
    say(tmp_path, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"names a Pooling module, but there is no .*1_Pooling/config\.json; copy it"):
        pooling_of_checkpoint(tmp_path)
    assert pooling_of_checkpoint(tmp_path, "MEAN") == CheckpointPooling("MEAN", True, str(tmp_path / "modules.json"))


@pytest.mark.parametrize("text", ["{}", "[1]", "no json", "[{}]"])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises((ModelError, NotSupportedError), match=str(tmp_path / "modules.json")):
        pooling_of_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """Write a bare decoder, like Qwen3-Embedding, and return transformers' result for a prompt."""
    folder = tmp_path_factory.mktemp("bare")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=96,
        dtype="float32",
    )
    model: Any = Qwen3Model(config)
    model.eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(torch.tensor([PROMPT])).last_hidden_state[0].numpy()


@pytest.fixture
def bare(saved: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path) -> Callable[..., Path]:
    """Copy a checkpoint with another config.json."""

    def copy(**changes: Any) -> Path:
        for file in saved[0].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return copy


def embedded(folder: Path, **changes: Any) -> np.ndarray[Any, Any]:
    config = engine_builders.a_config(folder, load_format="auto", num_gpu_blocks_override=16, **changes)
    engine, ready = start_engine(config, lambda stage, percent: None, engine_builders.ticking())
    engine.add(AddRequest("r", PROMPT, Sampling(), 0.0, pooling=ready.tasks.pooler.pooling()))
    (output,) = engine.step().outputs
    assert output.pooled is not None
    engine.add(AddRequest("generates", PROMPT, Sampling(), 0.0))
    (refused,) = engine.step().outputs
    assert (refused.finish_reason, refused.error) == ("error", f"no tokens are generated: {ready.tasks.no_generation}")
    return np.frombuffer(output.pooled, "<f4")


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_decoder_without_output_layer_embeds_by_its_name(
    bare: Callable[..., Path], saved: tuple[Path, np.ndarray[Any, Any]], architecture: str
) -> None:
    folder = bare(architectures=[architecture])
    last = saved[1][-1]
    np.testing.assert_allclose(embedded(folder), last / np.linalg.norm(last), atol=1e-5)
    facts = model_facts(str(folder))
    assert (facts["supported"], facts["architecture"]) == (True, "Qwen3ForCausalLM")
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert facts["weights_bytes"] == pytest.approx(stored, rel=0.02)


def test_pooling_flag_overrides_checkpoint_files(
    bare: Callable[..., Path], saved: tuple[Path, np.ndarray[Any, Any]]
) -> None:
    folder, states = bare(), saved[1]
    say(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    np.testing.assert_allclose(embedded(folder), states.mean(axis=0), atol=1e-5)
    cut = PoolerConfig(pooling_type="LAST", normalize=True, dimensions=7)
    np.testing.assert_allclose(embedded(folder, pooler=cut), states[-1][:7] / np.linalg.norm(states[-1][:7]), atol=1e-5)


def test_cls_pooling_is_rejected_with_remedy(bare: Callable[..., Path]) -> None:
    folder = bare()
    say(folder, "Transformer", "Pooling", pooling_mode_cls_token=True)
    with pytest.raises(
        NotSupportedError, match=r"CLS is not supported: the first token of a decoder attends to no other one.*--pooler"
    ):
        embedded(folder)
    assert embedded(folder, pooler=PoolerConfig(pooling_type="MEAN")).shape == (64,)


@pytest.mark.parametrize(("name", "value"), [("is_causal", False), ("use_bidirectional_attention", True)])
def test_a_decoder_whose_tokens_see_those_behind_them_is_refused(
    bare: Callable[..., Path], name: str, value: bool
) -> None:
    with pytest.raises(
        ModelError, match=f"{name} is {str(value).lower()}, so this Qwen3ForCausalLM uses bidirectional"
    ):
        embedded(bare(**{name: value}))
    assert embedded(bare(**{name: not value})).shape == (64,)


def test_without_output_layer_nothing_can_be_generated(bare: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="--runner generate: the checkpoint has no output layer"):
        embedded(bare(), runner="generate")


def test_dimensions_beyond_the_model_s_are_refused_at_the_start(bare: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="dimensions is 65; the model has 64"):
        embedded(bare(), pooler=PoolerConfig(dimensions=65))
