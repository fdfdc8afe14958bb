"""The model runner: start-up order, measurements, and results of a batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.models.registry import BY_ARCHITECTURE
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_modelspec.kv_groups import LayerKV, uniform_group

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def a_runner(folder: Path, *, progress: list[float] | None = None, **changes: Any) -> ModelRunner:
    """Return a runner with random weights from config.json only."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    config = EngineConfig(model=str(folder), load_format="dummy", **changes)
    runner = load_model_runner(
        ModelRunner,
        config,
        Device("cpu"),
        lambda stage, percent: progress.append(percent) if progress is not None else None,
    )
    runner.init_kv_cache(64)
    runner.kv_cache.map_blocks(64)
    return runner


def a_sequence(
    length: int, blocks: list[int], *, start: int = 0, samples: bool = True, seed: int = 0
) -> ScheduledSequence:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 301, (length,), generator=generator).tolist()
    request = Request.of("r", tokens, Sampling(), arrival_time=0.0)
    request.block_tables[0] = blocks
    return ScheduledSequence(request, start, length - start, samples)


def test_facts_are_the_models(tmp_path: Path) -> None:
    facts = a_runner(tmp_path).facts
    assert (facts.vocab_size, facts.max_model_len, facts.head_size) == (301, 256, 16)
    assert facts.kv_groups == (uniform_group(2, 2, 16),)
    assert facts.eos_token_ids == (5, 2)
    assert (facts.dtype, facts.kv_dtype_bytes) == ("float32", 4), "auto is float32 on the CPU"


def test_loading_reports_progress_up_to_the_end(tmp_path: Path) -> None:
    progress: list[float] = []
    a_runner(tmp_path, progress=progress)
    assert progress == sorted(progress)
    assert progress[-1] == 100.0


def test_dummy_weights_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    sequence = a_sequence(20, [3, 1])
    first, again, other = (a_runner(tmp_path, seed=seed).execute([sequence]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_max_model_len_above_the_models_is_refused(tmp_path: Path) -> None:
    assert a_runner(tmp_path, max_model_len=100).facts.max_model_len == 100
    with pytest.raises(ConfigError, match="to 256, the model's positions"):
        a_runner(tmp_path, max_model_len=257)


def test_profiling_measures_a_bounded_peak(tmp_path: Path) -> None:
    runner = a_runner(tmp_path)
    assert 0 <= runner.profile(700, 32) < 300 << 20


def test_only_sampling_sequences_get_rows_in_the_order_given(tmp_path: Path) -> None:
    runner = a_runner(tmp_path)
    sequences = [
        a_sequence(20, [0, 1], seed=1),
        a_sequence(1, [2], seed=2),
        a_sequence(33, [3, 4, 5], seed=3, samples=False),
        a_sequence(5, [6], seed=4),
    ]
    together = runner.execute(sequences)
    assert together.shape == (3, 301)
    assert together.dtype == torch.float32
    alone = torch.cat([runner.execute([s]) for s in sequences if s.samples])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_batch_that_samples_nothing_gives_no_rows(tmp_path: Path) -> None:
    assert a_runner(tmp_path).execute([a_sequence(7, [0], samples=False)]).shape == (0, 301)


def test_moved_blocks_give_the_same_logits(tmp_path: Path) -> None:
    """A request continues correctly after its blocks were moved in the cache."""
    runner = a_runner(tmp_path)
    whole = a_sequence(40, [60, 61, 62])
    expected = runner.execute([whole])
    prefix = ScheduledSequence(whole.request, 0, 39, samples=False)
    runner.execute([prefix])
    runner.kv_cache.copy_blocks([(60, 5), (61, 9), (62, 1)])
    whole.request.block_tables[0] = [5, 9, 1]
    runner.kv_cache.unmap_above(10)
    last = runner.execute([ScheduledSequence(whole.request, 39, 1, samples=True)])
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        (
            [LayerKV(num_kv_heads=1, key_size=24, value_size=8)] * 2,
            "2 layers with full attention, key size 24, value size 8",
        ),
        (
            [LayerKV(num_kv_heads=1, key_size=size, value_size=size) for size in (16, 32)],
            "1 layers with full attention, key size 16, value size 16, .*key size 32, value size 32",
        ),
    ],
)
def test_a_kv_geometry_that_is_not_built_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: list[LayerKV], words: str
) -> None:
    """Facts and memory formula know layers of several sizes; attention does not."""
    family = replace(BY_ARCHITECTURE["LlamaForCausalLM"], kv=lambda config: kv)
    monkeypatch.setitem(BY_ARCHITECTURE, "LlamaForCausalLM", family)
    with pytest.raises(NotSupportedError, match=words):
        a_runner(tmp_path)
