"""Llama 4 tiles: tokens equal transformers' under all engine features."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import Reference
from tiled_model import a_tile, the_reference, what_transformers_gets
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling
from vision_model import VisionPrompt, a_prompt, reference_of, save
from vision_runs import NUM_TOKENS, Run, check_with_the_steps_of_a_device, defects, graphs_over_ranks

BASE = {"load_format": "auto", "dtype": "float32", "num_gpu_blocks_override": 200, "limit_mm_per_prompt": {"image": 4}}
PROMPTS: dict[str, VisionPrompt] = {
    "one tile": a_prompt(4, a_tile(1), 5),
    "two tiles and the whole": a_prompt(3, a_tile(2), 1, a_tile(3), 2, a_tile(4), 3),
    "two pictures": a_prompt(a_tile(5), 2, a_tile(1), 3),
    "no image": a_prompt(20),
}
TIGHT = {"max_model_len": 96, "num_gpu_blocks_override": 28, "max_num_batched_tokens": 16, "encoder_cache_size": 8}
SWAP = {"swap_space_bytes": 64 << 20, "swap_space_bytes_cap": 64 << 20, "preemption_mode": "swap"}
DRAFTS = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}


@pytest.fixture(scope="module")
def reference() -> Any:
    return the_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(reference, tmp_path_factory.mktemp("tiled")))


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[str, Reference]:
    return {name: reference_of(reference, p, NUM_TOKENS, what_transformers_gets) for name, p in PROMPTS.items()}


def an_engine(checkpoint: Path, **changes: Any) -> Engine:
    return engine_builders.an_engine(checkpoint, **BASE | changes)


def test_alone_together_and_from_the_prefix_cache(checkpoint: Path, expected: dict[str, Reference]) -> None:
    run = Run(an_engine(checkpoint))
    for name, prompt in PROMPTS.items():
        run.add({name: prompt})
        assert defects({name: run.to_the_end().tokens[name]}, expected) == []
    run.add(PROMPTS)
    assert defects(run.to_the_end().tokens, expected) == []
    assert run.num_cached > 0
    assert run.num_encoded == 5  # each tile once, though two prompts bring the first


def test_the_likeliest_tokens_are_as_likely_as_in_transformers(checkpoint: Path, reference: Any) -> None:
    """Within 1e-4 of the range of the logits."""
    engine = an_engine(checkpoint)
    for name, prompt in PROMPTS.items():
        sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
        engine.add(AddRequest(name, list(prompt.token_ids), sampling, arrival_time=0.0, spans=prompt.spans))
        told = next(output.logprobs for _ in range(9) for output in engine.step().outputs)
        assert told is not None
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt.token_ids]), **what_transformers_gets(prompt)).logits[0, -1]
        likely = logits.log_softmax(dim=-1)[torch.tensor(told[0].token_ids)]
        assert (torch.tensor(told[0].logprobs) - likely).abs().max() <= 1e-4 * (logits.max() - logits.min())


@pytest.mark.parametrize(
    ("changes", "preempted"),
    [
        ({}, "recompute"),
        (SWAP, "swap"),
        ({"tensor_parallel_size": 2}, "recompute"),
        ({"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}, "recompute"),
        ({"pipeline_parallel_size": 2}, "recompute"),
    ],
    ids=["preempted", "swapped", "tp2", "tp2 with a tower each", "pp2"],
)
def test_in_little_room(
    changes: dict[str, Any], preempted: str, checkpoint: Path, expected: dict[str, Reference]
) -> None:
    """Prompts are cut, tiles are displaced and requests preempted, on one rank and on two."""
    engine = an_engine(checkpoint, **TIGHT | changes)
    try:
        run = Run(engine)
        run.add(PROMPTS)
        assert defects(run.to_the_end().tokens, expected) == []
        assert run.num_preempted.get(preempted, 0) > 0
    finally:
        engine.close()


def test_outputs_equal_during_kv_resize(checkpoint: Path, expected: dict[str, Reference]) -> None:
    free = {"max_model_len": 128, "num_gpu_blocks_override": None, "device_memory_bytes": 512 << 20}
    least = an_engine(checkpoint, **free).config()["fields"]["gpu_memory_utilization"]["min"]
    most = f"{least + 0.0016:.6f}"
    engine = an_engine(checkpoint, **free, gpu_memory_utilization=most, gpu_memory_utilization_cap=most)
    live = engine.config()["fields"]["gpu_memory_utilization"]
    run = Run(engine)
    run.add(PROMPTS)
    for number in itertools.count():
        if not engine.has_work:
            break
        if number % 6 == 5:
            sizes = {"gpu_memory_utilization": live["max"] if number % 12 == 5 else live["min"]}
            assert engine.patch_config(PatchConfig(sizes))[0] == 200
        run.step()
    assert defects(run.tokens, expected) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"async_scheduling": True},
        {"enforce_eager": True},
        TIGHT | SWAP | {"async_scheduling": True},
        DRAFTS | {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    ],
    ids=["overlapping", "eager", "swapped, overlapping", "drafts, chunked"],
)
def test_outputs_equal_with_device_steps(
    changes: dict[str, Any], checkpoint: Path, expected: dict[str, Reference]
) -> None:
    engine = partial(an_engine, checkpoint, **changes)
    check_with_the_steps_of_a_device(engine, PROMPTS, expected, is_eager="enforce_eager" in changes)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data", "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tp2", "tp2 with a tower each, ep", "pp2"],
)
@pytest.mark.usefixtures("forked")
def test_outputs_equal_with_device_steps_over_ranks(
    layout: dict[str, Any], checkpoint: Path, expected: dict[str, Reference], tmp_path: Path
) -> None:
    """Every rank takes the same graph, or none."""
    engine = partial(an_engine, checkpoint, async_scheduling=True, **layout)
    graphs = graphs_over_ranks(engine, PROMPTS, expected, tmp_path)
    assert "Eager.IMAGES" in graphs
    assert any("tokens_per_sequence=1," in graph for graph in graphs)


def test_vision_encoder_with_too_many_ranks_is_rejected(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--mm-encoder-tp-mode weights \(data .*the vision encoder's num_heads 2 cannot be"
    ):
        an_engine(checkpoint, tensor_parallel_size=4)
