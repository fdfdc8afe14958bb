"""Adapters with a device's steps: static inputs, graphs, slot indices for kernels. Tokens must equal the CPU's, with
padding, replays, loads and unloads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from adapter_folders import EVERY, an_adapter, modules_of
from calling_recorder import all_steps_follow, steps_of_a_device
from trimtab_engine.config.adapters import AdapterConfig, AdapterModule
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core import startup
from trimtab_engine.core.engine import Engine
from trimtab_engine.layers.adapted import StackedAdaptedLinear
from trimtab_engine.messages.admin import LoadLora, Sleep, UnloadLora, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.scheduling.sampling import Sampling

VOCABULARY = 97
NAMES = ("", "wide", "narrow")


@pytest.fixture
def model(model_of: Callable[..., Path]) -> Path:
    return model_of()


@pytest.fixture
def adapters(model: Path, tmp_path: Path) -> AdapterConfig:
    """Two, of different ranks, which adapt different projections."""
    shapes = expected_shapes(parse_model_config(json.loads((model / "config.json").read_text()), {}, "config.json"))
    wide = an_adapter(tmp_path / "wide", modules_of(shapes, EVERY), rank=20, seed=1, size=0.3)
    narrow = an_adapter(tmp_path / "narrow", modules_of(shapes, ("v_proj", "down_proj")), rank=3, seed=2, size=0.5)
    modules = (AdapterModule(name="wide", path=wide), AdapterModule(name="narrow", path=narrow))
    return AdapterConfig(modules=modules, max_loras=2, max_lora_rank=32)


def an_engine(model: Path, **changes: Any) -> Engine:
    sizes = {"num_gpu_blocks_override": 96, "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    config = engine_builders.a_config(model, **(sizes | changes))
    return startup.start_engine(config, lambda stage, percent: None, engine_builders.ticking())[0]


def projections_of(engine: Engine) -> list[StackedAdaptedLinear]:
    """All of them are for kernels."""
    slots = engine._runner._adapters
    assert slots is not None
    own = [each for each in slots._projections if isinstance(each, StackedAdaptedLinear)]
    assert len(own) == len(slots._projections)
    return own


def requests(number: int = 1, names: tuple[str, ...] = NAMES) -> list[AddRequest]:
    """Prompts of 1 to 40 tokens, so that there are chunks, decodes and mixed steps, with alternating adapters."""
    dice = random.Random(number)
    return [
        AddRequest(
            str(place),
            [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 40))],
            Sampling(temperature=0.0, max_tokens=dice.randint(1, 12), ignore_eos=True),
            arrival_time=0.0,
            adapter=names[place % len(names)],
        )
        for place in range(9)
    ]


def generate(engine: Engine, asked: list[AddRequest], graphs: dict[str, int] | None = None) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        step = engine.step()
        if graphs is not None:
            graphs |= step.stats.graph_steps
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check_integrity()
    return tokens


@pytest.fixture
def expected(model: Path, adapters: AdapterConfig) -> dict[str, list[int]]:
    """Reference tokens from the CPU's steps. The adapters change them."""
    tokens = generate(an_engine(model, adapters=adapters), requests())
    assert tokens != generate(an_engine(model), requests(names=("",)))
    return tokens


SPECULATION = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1),
    "num_speculative_tokens": 2,
    "num_speculative_tokens_cap": 2,
}
MODES = {
    "both": {"compilation": CompilationConfig()},
    "full": {"compilation": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)},
    "few sizes": {"compilation": CompilationConfig(cudagraph_capture_sizes=(4, 40))},
    "lazy": {"compilation": CompilationConfig(cudagraph_lazy_capture=True)},
    "eager": {"enforce_eager": True},
    "overlapped": {"async_scheduling": True},
    "preempting": {"async_scheduling": True, "num_gpu_blocks_override": 18},
    "drafts": SPECULATION,
}


@pytest.mark.parametrize("changes", MODES.values(), ids=MODES.keys())
def test_tokens_are_those_of_the_cpus_own_steps(
    model: Path, adapters: AdapterConfig, expected: dict[str, list[int]], changes: dict[str, Any]
) -> None:
    graphs: dict[str, int] = {}
    with steps_of_a_device():
        engine = an_engine(model, adapters=adapters, **changes)
        assert projections_of(engine)
        assert generate(engine, requests(), graphs) == expected
    assert bool(graphs) != ("enforce_eager" in changes)


def test_steps_without_adapters_replay_graphs_without_them(model: Path, adapters: AdapterConfig) -> None:
    with steps_of_a_device():
        engine = an_engine(model, adapters=adapters, compilation=CompilationConfig(cudagraph_lazy_capture=True))
        steps = engine._runner.steps
        assert steps is not None
        steps.drop_graphs()
        generate(engine, requests(names=("",)))
        assert {key.with_adapters for key in steps._graphs} == {False}
        steps.drop_graphs()
        generate(engine, requests(names=("wide",)))
        assert {key.with_adapters for key in steps._graphs} == {True}


def test_decodes_with_adapters_are_laid_out_in_columns_and_follow_each_other(
    model: Path, adapters: AdapterConfig, expected: dict[str, list[int]]
) -> None:
    with steps_of_a_device():
        engine = an_engine(model, adapters=adapters, async_scheduling=True)
        assert all_steps_follow(engine, lambda: generate(engine, requests())) == expected


def test_adapters_come_and_go_while_graphs_stay(
    model: Path, adapters: AdapterConfig, expected: dict[str, list[int]]
) -> None:
    """An adapter loaded later is stored where the graphs read it; a reused slot keeps nothing of the previous
    adapter.
    """
    updatable = AdapterConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=32, is_updatable=True)
    folders = {module.name: module.folder for module in adapters.modules}
    with steps_of_a_device() as recorder:
        engine = an_engine(model, adapters=updatable)
        captured = recorder.num_records
        first, second = ("wide", "narrow"), ("narrow", "wide")
        for order in (first, second):
            for name in order:
                assert engine.load_adapter(LoadLora(name, folders[name]))[0] == 200
            assert generate(engine, requests()) == expected
            for name in order:
                assert engine.unload_adapter(UnloadLora(name))[0] == 200
            generate(engine, requests(names=("",)))
        assert recorder.num_records == captured


def test_after_a_deep_sleep_adapters_are_where_graphs_are_recorded_anew(
    model: Path, adapters: AdapterConfig, expected: dict[str, list[int]]
) -> None:
    with steps_of_a_device():
        engine = an_engine(model, adapters=adapters)
        assert generate(engine, requests()) == expected
        engine.lifecycle(Sleep(2, "abort"))
        engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
        assert generate(engine, requests()) == expected


def test_adapter_slots_hold_the_largest_rank(model: Path, adapters: AdapterConfig) -> None:
    with steps_of_a_device():
        engine = an_engine(model, adapters=adapters)
    sizes = {tuple(own._down.shape[:2]) for own in projections_of(engine) if own._down is not None}
    assert sizes == {(2, 64), (2, 48), (2, 32)}, "three parts of rank 20, two, and one, in steps of 16"
