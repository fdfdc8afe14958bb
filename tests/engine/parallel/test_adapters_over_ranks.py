"""Adapters on several ranks, stages and cores: the tokens of one rank, and all of them have one, or none has."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from adapter_folders import EVERY, an_adapter, merged, modules_of
from calling_recorder import noted, steps_of_a_device
from trimtab_engine.config.adapters import AdapterConfig, AdapterModule
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.graphs import CompilationConfig
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import LoadLora, Sleep, UnloadLora, WakeUp
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config

pytestmark = pytest.mark.usefixtures("forked")

DRAFTS = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "num_speculative_tokens": 3,
    "num_speculative_tokens_cap": 3,
}
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
LAYOUTS = [
    pytest.param("dense", {"tensor_parallel_size": 2, "async_scheduling": True} | SWAP, id="dense tp2 async swapping"),
    pytest.param("dense", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | DRAFTS, id="dense tp2 pp2 drafts"),
    pytest.param("moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="moe tp2 ep"),
    pytest.param("awq", {"tensor_parallel_size": 2}, id="awq tp2"),
]


@pytest.fixture(scope="module")
def adapters(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AdapterConfig]:
    """Return two adapters per model, created on demand."""
    made: dict[str, AdapterConfig] = {}

    def config_of(name: str) -> AdapterConfig:
        if name not in made:
            config = json.loads((Path(models[name]) / "config.json").read_text())
            shapes = expected_shapes(parse_model_config(config, {}, "config.json"))
            folder = tmp_path_factory.mktemp(name)
            wide, narrow = modules_of(shapes, EVERY), modules_of(shapes, ("v_proj", "o_proj", "down_proj"))
            first = an_adapter(folder / "a", wide, rank=4, seed=1, size=0.2)
            second = an_adapter(folder / "b", narrow, rank=7, seed=2, size=0.2)
            modules = (AdapterModule(name="a", path=first), AdapterModule(name="b", path=second))
            made[name] = AdapterConfig(modules=modules, max_loras=2)
        return made[name]

    return config_of


def with_adapters(asked: list[AddRequest]) -> list[AddRequest]:
    """Return requests without an adapter, with the first, and with the second: four each, two of which
    share a prefix.
    """
    names = ("", "a", "b")
    return [msgspec.structs.replace(request, adapter=names[place // 4 % 3]) for place, request in enumerate(asked)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dense", {"tensor_parallel_size": 2, "async_scheduling": True}, id="dense tp2 overlapped"),
        pytest.param("dense", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | DRAFTS, id="dense tp2 pp2"),
        pytest.param("moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="moe tp2 ep"),
    ],
)
def test_adapters_equal_with_device_steps(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    expected: dict[str, dict[str, list[int]]],
    tmp_path: Path,
) -> None:
    """Every rank replays the same graphs, including those with adapters."""
    serve, requests, _ = serving
    asked = with_adapters(requests())
    if model not in expected:
        expected[model] = serve(start(models[model], adapters=adapters(model)), asked)
    with steps_of_a_device(tmp_path):
        engine = start(models[model], adapters=adapters(model), **layout)
        assert serve(engine, asked) == expected[model]
        engine.close()
    taken = noted(tmp_path)
    assert len(taken) == layout.get("tensor_parallel_size", 1) * layout.get("pipeline_parallel_size", 1)
    assert all(of_rank == taken[0] for of_rank in taken)
    assert any("with_adapters=True" in graph for graph in taken[0])


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_tokens_equal_those_of_one_rank(
    model: str,
    layout: dict[str, Any],
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    tight: dict[str, Any],
    expected: dict[str, dict[str, list[int]]],
) -> None:
    serve, requests, check_disturbed = serving
    asked = with_adapters(requests())
    if model not in expected:
        expected[model] = serve(start(models[model], adapters=adapters(model)), asked)
    engine = start(models[model], adapters=adapters(model), **(tight | layout))
    steps: list[StepStats] = []
    assert serve(engine, asked, steps) == expected[model]
    assert serve(engine, asked, steps) == expected[model], "again, with cached blocks"
    check_disturbed(steps, asked)


def test_single_adapter_over_stages_keeps_tokens(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    expected: dict[str, dict[str, list[int]]],
) -> None:
    serve, requests, _ = serving
    asked = with_adapters(requests())
    if "dense" not in expected:
        expected["dense"] = serve(start(models["dense"], adapters=adapters("dense")), asked)
    alone = msgspec.structs.replace(adapters("dense"), max_loras=1)
    steps: list[StepStats] = []
    engine = start(models["dense"], adapters=alone, pipeline_parallel_size=2)
    assert serve(engine, asked, steps) == expected["dense"]


@pytest.mark.parametrize("model", ["moe", "windows", "sinks", "chunks"])
def test_adapters_equal_merged_weights_per_family(
    model: str,
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    tmp_path: Path,
) -> None:
    serve, requests, _ = serving
    asked = with_adapters(requests())
    found = serve(start(models[model], adapters=adapters(model)), asked)
    for module in adapters(model).modules:
        own = [msgspec.structs.replace(request, adapter="") for request in asked if request.adapter == module.name]
        alone = serve(start(merged(models[model], module.path, tmp_path / module.name)), own)
        assert alone == {name: found[name] for name in alone}


UPDATABLE = AdapterConfig(is_updatable=True, max_loras=2)


def test_an_adapter_is_loaded_on_every_rank_or_on_none(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    tmp_path: Path,
) -> None:
    """The mismatching layers belong to the other stage, the only place where the mismatch shows."""
    serve, requests, _ = serving
    asked = with_adapters(requests())
    wanted = serve(start(models["dense"], adapters=adapters("dense")), asked)
    engine = start(models["dense"], adapters=UPDATABLE, pipeline_parallel_size=2, tensor_parallel_size=2)
    bad = an_adapter(tmp_path / "bad", {"model.layers.0.input_layernorm": (48, 1)})
    for folder, message in ((bad, "the model's is [48]"), (str(tmp_path / "nowhere"), "is no folder here")):
        status, body = engine.load_adapter(LoadLora("a", folder))
        assert status == 400
        assert message in body["message"]
    for module in adapters("dense").modules:
        assert engine.load_adapter(LoadLora(module.name, module.path)) == (200, {})
    assert serve(engine, asked) == wanted


def test_adapter_unreadable_by_a_rank_is_rejected_everywhere(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The core's rank reads a different file, as on nodes with separate disks."""
    engine = start(models["dense"], adapters=UPDATABLE, tensor_parallel_size=2)
    first, second = (module.path for module in adapters("dense").modules)
    from trimtab_engine.runner.model_runner import ModelRunner

    read = ModelRunner.load_adapter
    monkeypatch.setattr(ModelRunner, "load_adapter", lambda self, slot, name, folder: read(self, slot, name, second))
    status, body = engine.load_adapter(LoadLora("a", first))
    assert status == 400
    assert "rank 1 finds other files in" in body["message"]
    monkeypatch.undo()
    assert engine.state().adapters == ()
    assert engine.load_adapter(LoadLora("a", first)) == (200, {})


def test_unexpected_error_of_a_rank_leaves_the_engine_serving(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error that no check expects, on the core's rank while the other rank loads the adapter."""
    from trimtab_engine.runner.model_runner import ModelRunner

    def broken(*_: Any) -> bytes:
        raise RuntimeError("unexpected")

    serve, requests, _ = serving
    asked = with_adapters(requests())
    wanted = serve(start(models["dense"], adapters=adapters("dense")), asked)
    engine = start(models["dense"], adapters=UPDATABLE, tensor_parallel_size=2)
    folder = adapters("dense").modules[0].path
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "load_adapter", broken)
        status, body = engine.load_adapter(LoadLora("a", folder))
        assert (status, "unexpected" in body["message"]) == (500, True)
    assert engine.state().adapters == ()
    for module in adapters("dense").modules:
        assert engine.load_adapter(LoadLora(module.name, module.path)) == (200, {})
    assert serve(engine, asked) == wanted


def test_wake_up_without_files_is_rejected_on_all_ranks(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    tmp_path: Path,
) -> None:
    """The weights for a moment, then an adapter for ever."""
    serve, requests, _ = serving
    asked = [msgspec.structs.replace(request, adapter="a") for request in requests()[:4]]
    model = Path(shutil.copytree(models["dense"], tmp_path / "model"))
    modules = [
        msgspec.structs.replace(each, path=str(shutil.copytree(each.path, tmp_path / each.name)))
        for each in adapters("dense").modules
    ]
    engine = start(str(model), adapters=AdapterConfig(modules=tuple(modules), max_loras=2), tensor_parallel_size=2)
    expected = serve(engine, asked)
    assert engine.lifecycle(Sleep(2, "keep"))[0] == 200
    (model / "config.json").rename(tmp_path / "config.json")
    status, body = engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
    assert status == 409
    assert "rank 0: " in body["message"]
    assert "rank 1: " in body["message"]
    (tmp_path / "config.json").rename(model / "config.json")
    (Path(modules[1].path) / "adapter_config.json").unlink()
    assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
    assert serve(engine, asked) == expected
    assert [card.name for card in engine.state().adapters] == ["a"]


def test_cores_have_an_adapter_together(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    cores_of: Any,
    config_of: Callable[..., EngineConfig],
    tmp_path: Path,
) -> None:
    serve, requests, _ = serving
    asked = with_adapters(requests())
    wanted = serve(start(models["dense"], adapters=adapters("dense")), asked)

    async def live() -> None:
        async with cores_of(config_of(models["dense"], adapters=UPDATABLE, data_parallel_size=2)) as cores:
            reply = await cores.call(LoadLora("a", str(tmp_path / "nowhere")))
            assert (reply.status, "is no folder here" in reply.body["message"]) == (400, True)
            for module in adapters("dense").modules:
                assert (await cores.call(LoadLora(module.name, module.path))).status == 200
            assert await cores.serve(asked) == wanted
            assert (await cores.call(LoadLora("a", adapters("dense").modules[1].path))).status == 400
            assert (await cores.call(UnloadLora("b"))).status == 200
            assert (await cores.call(UnloadLora("b"))).status == 404

    asyncio.run(live())


def test_cores_in_lockstep_take_graphs_with_adapters_together(
    models: dict[str, str],
    adapters: Callable[[str], AdapterConfig],
    start: Callable[..., Engine],
    serving: Any,
    cores_of: Any,
    config_of: Callable[..., EngineConfig],
    expected: dict[str, dict[str, list[int]]],
    tmp_path: Path,
) -> None:
    """Lazily captured by all cores at the same time, whichever has the request."""
    serve, requests, _ = serving
    asked = with_adapters(requests())
    if "moe" not in expected:
        expected["moe"] = serve(start(models["moe"], adapters=adapters("moe")), asked)
    lazy = CompilationConfig(cudagraph_lazy_capture=True)
    layout = {"data_parallel_size": 2, "enable_expert_parallel": True, "compilation": lazy}

    async def live() -> None:
        async with cores_of(config_of(models["moe"], adapters=adapters("moe"), **layout)) as cores:
            assert await cores.serve(asked) == expected["moe"]
            one = [asked[5]]
            assert await cores.serve(one) == {one[0].request_id: expected["moe"][one[0].request_id]}

    with steps_of_a_device(tmp_path):
        asyncio.run(live())
    first, second = noted(tmp_path)
    assert first == second
    assert {"with_adapters=True" in graph for graph in first} == {True, False}
