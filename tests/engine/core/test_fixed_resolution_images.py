"""Fixed-resolution images through transformers' vision encoders: tokens equal transformers' under all
engine features.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import Reference
from fixed_resolution_models import GIVEN, TOKENS, a_square, the_reference
from safetensors.torch import load_file, save_file
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling
from vision_model import VisionPrompt, a_prompt, reference_of, save
from vision_runs import NUM_TOKENS, Run, defects

BASE = {"load_format": "auto", "dtype": "float32", "num_gpu_blocks_override": 200, "limit_mm_per_prompt": {"image": 4}}
TIGHT = {"max_model_len": 136, "num_gpu_blocks_override": 42, "max_num_batched_tokens": 16, "encoder_cache_size": 32}
TIGHTER = TIGHT | {"max_model_len": 96, "num_gpu_blocks_override": 28, "encoder_cache_size": 8}
SWAP = {"swap_space_bytes": 64 << 20, "swap_space_bytes_cap": 64 << 20, "preemption_mode": "swap"}
NATIVE = ("llava", "smolvlm")
"""Models whose language model is built in, one of each kind."""


@dataclass(frozen=True, slots=True)
class Seeing:
    """A checkpoint, prompts for it, and transformers' outputs."""

    kind: str
    model: Any
    folder: Path
    prompts: dict[str, VisionPrompt]
    expected: dict[str, Reference]

    @property
    def little_room(self) -> dict[str, Any]:
        return TIGHTER if TOKENS[self.kind] == 4 else TIGHT


@pytest.fixture(scope="module", params=list(TOKENS))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    kind: str = request.param
    model = the_reference(kind)
    square = [a_square(kind, number) for number in range(6)]
    prompts = {
        "one image": a_prompt(4, square[1], 5),
        "three interleaved": a_prompt(3, square[2], 1, square[3], 2, square[4], 3),
        "two images": a_prompt(square[5], 2, square[1], 3),
        "no image": a_prompt(20),
    }
    expected = {name: reference_of(model, prompt, NUM_TOKENS, GIVEN[kind]) for name, prompt in prompts.items()}
    folder = Path(save(model, tmp_path_factory.mktemp("squares")))
    return Seeing(kind, model, folder, prompts, expected)


def an_engine(seeing: Seeing, **changes: Any) -> Engine:
    return engine_builders.an_engine(seeing.folder, **BASE | changes)


def test_alone_together_and_from_the_prefix_cache(seeing: Seeing) -> None:
    run = Run(an_engine(seeing))
    for name, prompt in seeing.prompts.items():
        run.add({name: prompt})
        assert defects({name: run.to_the_end().tokens[name]}, seeing.expected) == []
    run.add(seeing.prompts)
    assert defects(run.to_the_end().tokens, seeing.expected) == []
    assert run.num_cached > 0
    assert run.num_encoded == 5  # each once, though two prompts bring the first


def test_the_likeliest_tokens_are_as_likely_as_in_transformers(seeing: Seeing) -> None:
    """Within 1e-4 of the range of the logits."""
    engine = an_engine(seeing)
    for name, prompt in seeing.prompts.items():
        sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
        engine.add(AddRequest(name, list(prompt.token_ids), sampling, arrival_time=0.0, spans=prompt.spans))
        told = next(output.logprobs for _ in range(9) for output in engine.step().outputs)
        assert told is not None
        with torch.inference_mode():
            given = GIVEN[seeing.kind](prompt)
            logits = seeing.model(torch.tensor([prompt.token_ids]), **given).logits[0, -1]
        likely = logits.log_softmax(dim=-1)[torch.tensor(told[0].token_ids)]
        assert (torch.tensor(told[0].logprobs) - likely).abs().max() <= 1e-4 * (logits.max() - logits.min())


@pytest.mark.parametrize(("changes", "preempted"), [({}, "recompute"), (SWAP, "swap")], ids=["preempted", "swapped"])
def test_in_little_room(changes: dict[str, Any], preempted: str, seeing: Seeing) -> None:
    """Prompts are cut, images are displaced and requests preempted."""
    run = Run(an_engine(seeing, **seeing.little_room | changes))
    run.add(seeing.prompts)
    assert defects(run.to_the_end().tokens, seeing.expected) == []
    assert run.num_preempted.get(preempted, 0) > 0


@pytest.mark.parametrize("seeing", NATIVE, indirect=True)
@pytest.mark.parametrize(
    "changes",
    [{"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}, {"pipeline_parallel_size": 2}],
    ids=["tp2 with a tower each", "pp2"],
)
def test_on_two_ranks(changes: dict[str, Any], seeing: Seeing) -> None:
    """Only built-in language models; transformers' code runs on one rank."""
    engine = an_engine(seeing, **seeing.little_room | changes)
    try:
        run = Run(engine)
        run.add(seeing.prompts)
        assert defects(run.to_the_end().tokens, seeing.expected) == []
    finally:
        engine.close()


def test_outputs_equal_during_kv_resize(seeing: Seeing) -> None:
    free = {"max_model_len": 136, "num_gpu_blocks_override": None, "device_memory_bytes": 512 << 20}
    least = an_engine(seeing, **free).config()["fields"]["gpu_memory_utilization"]["min"]
    most = f"{least + 0.0016:.6f}"
    engine = an_engine(seeing, **free, gpu_memory_utilization=most, gpu_memory_utilization_cap=most)
    live = engine.config()["fields"]["gpu_memory_utilization"]
    run = Run(engine)
    run.add(seeing.prompts)
    for number in itertools.count():
        if not engine.has_work:
            break
        if number % 6 == 5:
            sizes = {"gpu_memory_utilization": live["max"] if number % 12 == 5 else live["min"]}
            assert engine.patch_config(PatchConfig(sizes))[0] == 200
        run.step()
    assert defects(run.tokens, seeing.expected) == []


@pytest.mark.parametrize("seeing", NATIVE, indirect=True)
def test_indivisible_vision_encoder_is_rejected(seeing: Seeing) -> None:
    with pytest.raises(ConfigError, match="give each the whole of it, with --mm-encoder-tp-mode data"):
        an_engine(seeing, tensor_parallel_size=2)


def test_without_images_its_text_is_served_and_no_tower_loaded(seeing: Seeing) -> None:
    engine = an_engine(seeing, limit_mm_per_prompt={"image": 0})
    run = Run(engine)
    run.add({"no image": seeing.prompts["no image"]})
    assert defects(run.to_the_end().tokens, seeing.expected) == []
    run.add({"one image": seeing.prompts["one image"]})
    run.to_the_end()
    assert "does not compute" in run.errors["one image"]


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_weights_that_lack_a_part_of_the_tower_are_refused(seeing: Seeing, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((seeing.folder / "config.json").read_text())
    tensors = load_file(seeing.folder / "model.safetensors")
    del tensors["model.connector.modality_projection.proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack 1 tensors, first model\.connector"):
        engine_builders.an_engine(tmp_path, **BASE)


@pytest.mark.parametrize("seeing", ["llava"], indirect=True)
def test_names_of_earlier_checkpoints_are_understood(seeing: Seeing, tmp_path: Path) -> None:
    """As published for LLaVA 1.5: encoder names have one more level."""
    (tmp_path / "config.json").write_text((seeing.folder / "config.json").read_text())
    tensors = load_file(seeing.folder / "model.safetensors")
    earlier = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}
    save_file(earlier, tmp_path / "model.safetensors")
    run = Run(engine_builders.an_engine(tmp_path, **BASE))
    run.add({"one image": seeing.prompts["one image"]})
    assert defects(run.to_the_end().tokens, seeing.expected) == []
