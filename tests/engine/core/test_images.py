"""Requests with images and videos: tokens equal transformers' under all engine features."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import Reference
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.errors import NotSupportedError
from trimtab_engine.messages.admin import WAKE_TAGS, PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling
from vision_model import (
    VisionPrompt,
    a_prompt,
    an_item,
    reference_of,
    save,
    the_reference,
    what_transformers_gets,
)
from vision_runs import NUM_TOKENS, Run, check_with_the_steps_of_a_device, defects, graphs_over_ranks

BASE = {"load_format": "auto", "dtype": "float32", "num_gpu_blocks_override": 200}
SEES = {"limit_mm_per_prompt": {"image": 4, "video": 1}}
A_PICTURE, ANOTHER = an_item((1, 4, 6), seed=1), an_item((1, 4, 6), seed=2)
PROMPTS: dict[str, VisionPrompt] = {
    "one image": a_prompt(4, A_PICTURE, 5),
    "the same words around another": a_prompt(4, ANOTHER, 5),
    "three interleaved": a_prompt(an_item((1, 10, 6), seed=3), 2, A_PICTURE, 1, an_item((1, 2, 8), seed=4), 3),
    "a video": a_prompt(3, an_item((4, 4, 6), kind="video", seed=5, seconds=0.7), 6),
    "a video longer than its metadata": a_prompt(2, an_item((6, 2, 2), kind="video", seed=6), 3),
    "one image twice": a_prompt(1, ANOTHER, 1, ANOTHER, 2),
    "no image": a_prompt(20),
}
LIKELY = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
SWAP = {"swap_space_bytes": 64 << 20, "swap_space_bytes_cap": 64 << 20, "preemption_mode": "swap"}
TIGHT = {"max_model_len": 128, "num_gpu_blocks_override": 18, "max_num_batched_tokens": 16}
SHORT = {"encoder_cache_size": 48, "max_num_encoder_input_tokens": 48}


@pytest.fixture(scope="module")
def reference() -> Any:
    return the_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(save(reference, Path(folder)))


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[str, Reference]:
    return {name: reference_of(reference, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}


def an_engine(checkpoint: Path, **changes: Any) -> Engine:
    return engine_builders.an_engine(checkpoint, **BASE | SEES | changes)


@pytest.mark.parametrize("name", PROMPTS)
def test_alone(name: str, checkpoint: Path, expected: dict[str, Reference]) -> None:
    run = Run(an_engine(checkpoint))
    run.add({name: PROMPTS[name]})
    assert defects(run.to_the_end().tokens, expected) == []


@pytest.mark.parametrize("name", PROMPTS)
def test_the_likeliest_tokens_are_as_likely_as_in_transformers(name: str, checkpoint: Path, reference: Any) -> None:
    """Within 1e-4 of the range of the logits."""
    prompt = PROMPTS[name]
    engine = an_engine(checkpoint)
    engine.add(AddRequest("r", list(prompt.token_ids), LIKELY, arrival_time=0.0, spans=prompt.spans))
    told = next(output.logprobs for _ in range(9) for output in engine.step().outputs)
    assert told is not None
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        logits = reference(ids, attention_mask=torch.ones_like(ids), **what_transformers_gets(prompt)).logits[0, -1]
    expected = logits.log_softmax(dim=-1)[torch.tensor(told[0].token_ids)]
    assert (torch.tensor(told[0].logprobs) - expected).abs().max() <= 1e-4 * (logits.max() - logits.min())


@pytest.mark.parametrize(
    ("changes", "preempted"),
    [
        ({}, None),
        ({"async_scheduling": True}, None),
        ({"enable_prefix_caching": False, "max_num_batched_tokens": 16}, None),  # chunks cut through the images
        (SHORT | {"max_num_batched_tokens": 16}, None),  # prompts stop before images that find no room
        (TIGHT | SHORT, "recompute"),
        (TIGHT | SHORT | SWAP | {"async_scheduling": True}, "swap"),
        (TIGHT | SHORT | SWAP | {"enable_prefix_caching": False}, "swap"),
    ],
    ids=["together", "overlapping", "chunked", "little room", "preempted", "swapped, overlapping", "swapped"],
)
def test_image_request_batched_with_text_requests(
    changes: dict[str, Any], preempted: str | None, checkpoint: Path, expected: dict[str, Reference]
) -> None:
    run = Run(an_engine(checkpoint, **changes))
    run.add(PROMPTS)
    assert defects(run.to_the_end().tokens, expected) == []
    assert preempted is None or run.num_preempted.get(preempted, 0) > 2


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | SWAP,
    ],
    ids=["tp2", "tp2 with a tower each", "pp2", "tp2 pp2 swapping"],
)
@pytest.mark.usefixtures("forked")
def test_over_ranks(layout: dict[str, Any], checkpoint: Path, expected: dict[str, Reference]) -> None:
    """Ranks of the first stage share the tower, or the items of a step; each keeps what all of them make."""
    engine = an_engine(checkpoint, **TIGHT | SHORT | layout)
    try:
        run = Run(engine)
        for _ in range(2):
            run.add(PROMPTS)
            assert defects(run.to_the_end().tokens, expected) == []
        assert sum(run.num_preempted.values()) > 2
    finally:
        engine.close()


def test_from_the_prefix_cache(checkpoint: Path, expected: dict[str, Reference]) -> None:
    """Blocks of equal words are shared only if their images are equal."""
    run = Run(an_engine(checkpoint))
    for _ in range(2):
        run.add(PROMPTS)
        assert defects(run.to_the_end().tokens, expected) == []
    longest = sum((len(prompt.token_ids) - 1) // 8 * 8 for prompt in PROMPTS.values())
    assert run.num_cached == longest
    different = {span.item.content_hash for prompt in PROMPTS.values() for span in prompt.spans}
    assert run.num_encoded == len(different)  # each once, though several prompts bring it


def test_outputs_equal_during_kv_resize(checkpoint: Path, expected: dict[str, Reference]) -> None:
    """Down to one request's need, and up again."""
    small = {"max_model_len": 128, "num_gpu_blocks_override": None, "device_memory_bytes": 512 << 20}
    free = SHORT | small  # a step of the utilisation is 26 blocks
    least = an_engine(checkpoint, **free).config()["fields"]["gpu_memory_utilization"]["min"]
    most = least + 0.0016  # about 400 blocks more
    engine = an_engine(
        checkpoint,
        **free,
        gpu_memory_utilization=f"{most:.6f}",
        gpu_memory_utilization_cap=f"{most:.6f}",
    )
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
    assert run.num_preempted["recompute"] > 2


@pytest.mark.parametrize("level", [1, 2])
def test_outputs_equal_after_weights_reload(level: int, checkpoint: Path, expected: dict[str, Reference]) -> None:
    """The tower's too, in the middle of prompts that are cut."""
    run = Run(an_engine(checkpoint, max_num_batched_tokens=16, **SHORT))
    run.add(PROMPTS)
    for _ in range(4):
        run.step()
    for call in (Sleep(level=level, mode="keep"), WakeUp(tags=[*WAKE_TAGS])):
        status, answer = run.engine.lifecycle(call)
        assert status == 200, answer
    assert defects(run.to_the_end().tokens, expected) == []


def test_images_are_not_shared_between_salts(checkpoint: Path, expected: dict[str, Reference]) -> None:
    run = Run(an_engine(checkpoint))
    for salt in ("one", "another"):
        run.add({"one image": PROMPTS["one image"]}, salt=salt)
        assert defects(run.to_the_end().tokens, expected) == []
    assert run.num_cached == 0


def test_core_reports_supported_modalities(checkpoint: Path) -> None:
    for limits, taken in (
        ({"image": 4, "video": 1}, ["image", "video"]),
        ({"image": 2, "video": 0}, ["image"]),
        ({}, []),
    ):
        config = engine_builders.a_config(checkpoint, **BASE, limit_mm_per_prompt=limits)
        _, ready = start_engine(config, lambda stage, percent: None, engine_builders.ticking())
        assert ready.modalities == taken


def test_engine_without_modalities_rejects_images(checkpoint: Path, expected: dict[str, Reference]) -> None:
    run = Run(an_engine(checkpoint, limit_mm_per_prompt={"image": 0, "video": 0}))
    run.add({name: PROMPTS[name] for name in ("one image", "no image")})
    run.to_the_end()
    assert "which this engine does not compute" in run.errors.pop("one image")
    assert run.errors == {}
    assert defects({"no image": run.tokens["no image"]}, expected) == []


@pytest.mark.parametrize(
    ("method", "changes"),
    [("ngram", {"async_scheduling": True}), ("ngram", TIGHT | SHORT), ("draft_model", {})],
    ids=["looked up, overlapping", "looked up, preempted", "by a model"],
)
def test_outputs_equal_with_drafts(
    method: Literal["ngram", "draft_model"],
    changes: dict[str, Any],
    checkpoint: Path,
    expected: dict[str, Reference],
) -> None:
    """The checkpoint's language model is its own draft model."""
    run = Run(an_engine(checkpoint, **changes | drafts(method, checkpoint)))
    run.add(PROMPTS)
    assert defects(run.to_the_end().tokens, expected) == []
    assert run.num_accepted > 9
    assert (run.num_preempted.get("recompute", 0) > 2) == ("num_gpu_blocks_override" in changes)


def drafts(method: Literal["ngram", "draft_model"], checkpoint: Path) -> dict[str, Any]:
    model = str(checkpoint) if method == "draft_model" else None
    config = SpeculativeConfig(method=method, model=model, num_speculative_tokens=3, prompt_lookup_min=1)
    return {"speculative": config, "num_speculative_tokens": 3, "num_speculative_tokens_cap": 3}


def test_hidden_state_drafts_with_images_are_not_supported(checkpoint: Path) -> None:
    with pytest.raises(NotSupportedError, match="method eagle is not supported with images and videos"):
        an_engine(checkpoint, speculative=SpeculativeConfig(method="eagle", model="m", num_speculative_tokens=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"async_scheduling": True},
        {"enforce_eager": True},
        TIGHT | SHORT | SWAP | {"async_scheduling": True},
        {"num_speculative_tokens": 3, "enable_prefix_caching": False, "max_num_batched_tokens": 16},
    ],
    ids=["overlapping", "eager", "swapped, overlapping", "drafts, chunked"],
)
def test_outputs_equal_with_device_steps(
    changes: dict[str, Any], checkpoint: Path, expected: dict[str, Reference]
) -> None:
    drafting = drafts("ngram", checkpoint) if "num_speculative_tokens" in changes else {}
    engine = partial(an_engine, checkpoint, **changes | drafting)
    check_with_the_steps_of_a_device(engine, PROMPTS, expected, is_eager="enforce_eager" in changes)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tp2", "tp2 with a tower each", "pp2"],
)
@pytest.mark.usefixtures("forked")
def test_outputs_equal_with_device_steps_over_ranks(
    layout: dict[str, Any], checkpoint: Path, expected: dict[str, Reference], tmp_path: Path
) -> None:
    """Every rank takes the same graph, or none."""
    engine = partial(an_engine, checkpoint, async_scheduling=True, **SHORT | layout)
    graphs = graphs_over_ranks(engine, PROMPTS, expected, tmp_path)
    assert {"Eager.IMAGES", "GraphKey(num_tokens=1, tokens_per_sequence=1, with_adapters=False)"} <= set(graphs)
