"""Adapters of the offline class: loaded at first use, per prompt of a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import EVERY, an_adapter, modules_of
from trimtab_engine import LLM, LoRARequest, SamplingParams
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config

TINY: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "cpu_threads": 1, "device_memory_bytes": "4Gi", "max_model_len": 128,
    "num_gpu_blocks_override": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return the folder of an adapter of the model, by number."""
    config = parse_model_config(json.loads((tiny_model / "config.json").read_text()), {}, "config.json")
    modules, folder = modules_of(expected_shapes(config), EVERY), tmp_path_factory.mktemp("adapters")
    made: dict[int, str] = {}

    def folder_of(number: int) -> str:
        if number not in made:
            made[number] = an_adapter(folder / str(number), modules, seed=number, size=0.5)
        return made[number]

    return folder_of


@pytest.fixture(scope="module")
def llm(tiny_model: Path, adapter: Callable[[int], str]) -> Iterator[LLM]:
    with LLM(
        str(tiny_model),
        enable_lora=True,
        lora_modules=[{"name": "a", "path": adapter(1)}],
        max_loras=2,
        max_cpu_loras=2,
        **TINY,
    ) as llm:
        yield llm


def texts(llm: LLM, *wanted: LoRARequest | None) -> list[str]:
    outputs = llm.generate(["a prompt"] * len(wanted), GREEDY, use_tqdm=False, lora_request=wanted)
    return [output.outputs[0].text for output in outputs]


def test_each_prompt_has_its_own_adapter(llm: LLM, adapter: Callable[[int], str]) -> None:
    first, second = LoRARequest("a"), LoRARequest("b", 2, adapter(2))
    mixed = texts(llm, first, None, second, first)
    assert len(set(mixed)) == 3
    assert mixed == [*texts(llm, first), *texts(llm, None), *texts(llm, second), mixed[0]]
    assert [output.outputs[0].text for output in llm.generate("a prompt", GREEDY, lora_request=second)] == [mixed[2]]


def test_least_recently_used_adapters_are_evicted(llm: LLM, adapter: Callable[[int], str]) -> None:
    def loaded() -> set[str]:
        return {card.name for card in llm.engine.state().adapters}

    texts(llm, LoRARequest("c", 3, adapter(3)))
    texts(llm, LoRARequest("d", 4, adapter(4)))
    assert loaded() == {"c", "d"}
    texts(llm, LoRARequest("c"))
    again = texts(llm, LoRARequest("b", 2, adapter(2)))
    assert loaded() == {"b", "c"}
    other = texts(llm, LoRARequest("b", 2, adapter(3)))
    assert other == texts(llm, LoRARequest("c"))
    assert other != again, "a different folder with the same name is a different adapter"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([LoRARequest("nobody")], "the adapter nobody is not loaded; set its lora_path"),
        ([LoRARequest("x", 1, "/nowhere")], "adapter /nowhere: is no folder here"),
        ([LoRARequest("x", 1, "/a"), LoRARequest("x", 1, "/b")], "lora_request: two adapters have the same name"),
        ([LoRARequest(name, 1, "/a") for name in "xyz"], "names 3 adapters, but max_cpu_loras is 2; raise it"),
    ],
)
def test_invalid_lora_requests_are_rejected_before_running(llm: LLM, wanted: list[LoRARequest], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        texts(llm, *wanted)
    with pytest.raises(InvalidRequest, match="lora_request: 1 for 3 prompts"):
        llm.generate(["a", "b", "c"], GREEDY, lora_request=[None])


def test_llm_without_adapters_error_names_remedy(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **TINY) as llm, pytest.raises(InvalidRequest, match="created with enable_lora=True"):
        texts(llm, LoRARequest("a", 1, "/a"))
