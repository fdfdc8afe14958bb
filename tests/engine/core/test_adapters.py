"""Adapters in the core: serving, loading and unloading while requests run, and rejection."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from adapter_folders import ATTENTION, EVERY, an_adapter, merged, modules_of
from served import serve
from trimtab_engine.config.adapters import AdapterConfig, AdapterModule
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.messages.admin import AdapterCard, LoadLora, Sleep, UnloadLora, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.weights.dummy import DummySource

PROMPT = [(7 * place) % 97 for place in range(20)]
Folders = Callable[..., str]


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights in a file, so that others can be merged of it."""
    from safetensors.torch import save_file

    bare = model_of()
    source = open_model(str(bare), "dummy")
    assert isinstance(source, DummySource)
    config = parse_model_config(json.loads((bare / "config.json").read_text()), {}, "config.json")
    source.expect(expected_shapes(config))
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_bytes((bare / "config.json").read_bytes())
    save_file({name: source.tensor(name).clone() for name in source.shapes()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Makes adapters of that model, by a seed."""
    config = parse_model_config(json.loads((model / "config.json").read_text()), {}, "config.json")
    shapes = expected_shapes(config)

    def folder_of(seed: int, targets: tuple[str, ...] = EVERY, **changes: Any) -> str:
        folder = tmp_path_factory.mktemp("adapter") / str(seed)
        return an_adapter(folder, modules_of(shapes, targets), seed=seed, size=0.5, **changes)

    return folder_of


def an_engine(model: Path, *, adapters: AdapterConfig | None = None, **changes: Any) -> Engine:
    settings = {"load_format": "auto", "num_gpu_blocks_override": 64, "max_model_len": 96} | changes
    return engine_builders.an_engine(model, adapters=adapters, **settings)


def served_from_start(*folders: str, **changes: Any) -> AdapterConfig:
    """Return adapters named a, b, c and so on."""
    modules = tuple(AdapterModule(name=name, path=path) for name, path in zip("abcdef", folders, strict=False))
    return AdapterConfig(modules=modules, **changes)


def asked(name: str = "", request_id: str = "r", max_tokens: int = 16) -> AddRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return AddRequest(request_id, PROMPT, sampling, arrival_time=0.0, adapter=name)


def tokens(engine: Engine, name: str = "") -> list[int]:
    return serve(engine, [asked(name)]).tokens["r"]


def tokens_merged(model: Path, folder: str, place: Path) -> list[int]:
    return tokens(an_engine(Path(merged(model, folder, place))))


def load(engine: Engine, name: str, folder: str) -> tuple[int, str]:
    status, body = engine.load_adapter(LoadLora(name, folder))
    return status, body.get("message", "")


# --- served from the start ----------------------------------------------------------------------------------------


def test_each_adapter_is_served_by_its_name(model: Path, adapter: Folders, tmp_path: Path) -> None:
    first, second = adapter(1), adapter(2, ATTENTION)
    engine = an_engine(model, adapters=served_from_start(first, second))
    assert engine.state().adapters == (AdapterCard("a", first), AdapterCard("b", second))
    assert tokens(engine, "a") == tokens_merged(model, first, tmp_path / "a")
    assert tokens(engine, "b") == tokens_merged(model, second, tmp_path / "b")
    assert len({(*tokens(engine, name),) for name in ("", "a", "b")}) == 3


def test_a_name_that_is_not_served_ends_its_request_alone(model: Path, adapter: Folders) -> None:
    engine = an_engine(model, adapters=served_from_start(adapter(1)))
    engine.add(asked("nobody", "lost"))
    assert engine.has_room_for(asked("nobody")), "it is rejected by name, not for lack of room"
    (output,) = engine.step().outputs
    assert (output.finish_reason, output.error) == (
        "error",
        "the adapter nobody is not loaded; it was unloaded meanwhile",
    )
    assert len(tokens(engine, "a")) == 16


def test_an_engine_without_adapters_serves_none(model: Path) -> None:
    engine = an_engine(model)
    engine.add(asked("a"))
    assert engine.step().outputs[0].finish_reason == "error"
    assert load(engine, "a", "/nowhere")[0] == 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lora_rank": 3}, "its rank is 4, above --max-lora-rank 3; raise that to 4"),
        ({"modules": (AdapterModule(name="a", path="/nowhere"),)}, "adapter /nowhere: is no folder here"),
    ],
)
def test_unservable_adapter_fails_start(model: Path, adapter: Folders, changes: Any, message: str) -> None:
    values = {"modules": (AdapterModule(name="a", path=adapter(1)),)} | changes
    with pytest.raises(ConfigError, match=message):
        an_engine(model, adapters=AdapterConfig(**values))


def test_projections_without_room_for_adapters_are_named(model_of: Callable[..., Path], tmp_path: Path) -> None:
    """Neither a router nor the up-projection of latent attention supports adapters."""
    mixture = model_of(
        architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    router = an_adapter(tmp_path / "router", {"model.layers.0.mlp.gate": (4, 64)})
    with pytest.raises(NotSupportedError, match=r"it adapts model.layers.0.mlp.gate, and adapters of that projection"):
        an_engine(mixture, adapters=served_from_start(router), load_format="dummy")


def test_memory_that_adapters_take_is_that_of_weights(model: Path, adapter: Folders) -> None:
    """Exact to the byte, by counting torch allocations. Frees count too, so no earlier engine may be left for garbage
    collection.
    """

    def weights(adapters: AdapterConfig | None) -> int:
        gc.collect()
        return int(an_engine(model, adapters=adapters).memory()["kinds"]["weights"])

    bare = weights(None)
    one, two = (weights(served_from_start(*[adapter(1), adapter(2)][:count])) - bare for count in (1, 2))
    floats = 4 * 2 * (64 * 3 + (64 + 32 + 32) * 3 + 64 * 2 + 64 * 2 + 2 * (64 + 96 * 2) + 96 + 64 - 64 * 2)
    assert one == floats * 4
    assert two == 2 * one
    room = weights(AdapterConfig(max_cpu_loras=3, max_lora_rank=8, is_updatable=True)) - bare
    assert room == 3 * 2 * one, "as large before anything is loaded"


def test_room_that_the_device_has_not_is_refused_before_any_weight_is_read(model: Path) -> None:
    config = AdapterConfig(max_cpu_loras=1024, max_lora_rank=4096, is_updatable=True)
    with pytest.raises(ConfigError, match="out of memory before loading: the weights take 29"):
        an_engine(model, adapters=config, num_gpu_blocks_override=None)


def test_drafts_of_the_model_alone_change_no_token_of_an_adapter(model: Path, adapter: Folders) -> None:
    first = adapter(1)
    wanted = tokens(an_engine(model, adapters=served_from_start(first)), "a")
    for method in ("ngram", "draft_model"):
        speculative = SpeculativeConfig(
            method=method,
            model=str(model) if method == "draft_model" else None,
            num_speculative_tokens=3,
            prompt_lookup_min=1,
        )
        depth = {"num_speculative_tokens": 3, "num_speculative_tokens_cap": 3}
        engine = an_engine(model, adapters=served_from_start(first), speculative=speculative, **depth)
        assert tokens(engine, "a") == wanted


# --- loaded and unloaded while others are served ------------------------------------------------------------------


def updatable(**changes: Any) -> AdapterConfig:
    return AdapterConfig(**{"max_cpu_loras": 2, "is_updatable": True} | changes)


def test_an_adapter_is_loaded_while_requests_run_and_changes_none_of_them(
    model: Path, adapter: Folders, tmp_path: Path
) -> None:
    first, second = adapter(1), adapter(2, rank=2)
    engine = an_engine(model, adapters=updatable(max_loras=2), async_scheduling=True)
    assert load(engine, "a", first) == (200, "")
    found: dict[str, list[int]] = {}
    steps = 0
    engine.add(asked("a", "before"))
    while engine.has_work:
        if steps == 5:
            assert load(engine, "b", second) == (200, "")
            engine.add(asked("b", "after"))
        for output in engine.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
        engine.check_integrity()
    assert found["before"] == tokens_merged(model, first, tmp_path / "a")
    assert found["after"] == tokens_merged(model, second, tmp_path / "b")


def test_requests_of_unloaded_adapter_finish_with_that_adapter(model: Path, adapter: Folders, tmp_path: Path) -> None:
    """Its slot stays reserved until they have ended."""
    first, second, third = adapter(1), adapter(2), adapter(3)
    engine = an_engine(model, adapters=updatable())
    load(engine, "a", first)
    load(engine, "b", second)
    engine.add(asked("a", "running"))
    engine.step()
    assert engine.unload_adapter(UnloadLora("a")) == (200, {})
    assert [card.name for card in engine.state().adapters] == ["b"]
    status, message = load(engine, "c", third)
    assert status == 400
    assert "requests still use an adapter that was unloaded; try again when they have ended" in message
    engine.add(asked("a", "late"))
    found: dict[str, list[int]] = {"running": [], "late": []}
    ends = {}
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.token_ids
            ends[output.request_id] = output.finish_reason
    assert ends == {"running": "length", "late": "error"}
    wanted = tokens_merged(model, first, tmp_path / "a")
    assert found["running"] == wanted[-len(found["running"]) :]
    assert len(found["running"]) >= 15
    assert load(engine, "c", third) == (200, "")
    assert tokens(engine, "c") == tokens_merged(model, third, tmp_path / "c")
    assert tokens(engine, "b") == tokens_merged(model, second, tmp_path / "b")


def test_reloaded_adapter_name_uses_new_weights(model: Path, adapter: Folders, tmp_path: Path) -> None:
    first, second = adapter(1), adapter(2)
    engine = an_engine(model, adapters=updatable())
    for folder in (first, second, first):
        assert load(engine, "a", folder) == (200, "")
        assert tokens(engine, "a") == tokens_merged(model, folder, tmp_path / f"{len(list(tmp_path.iterdir()))}")
        assert engine.unload_adapter(UnloadLora("a")) == (200, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a", "the adapter a is loaded already; unload it first"),
        ("c", "all 2 places are taken (--max-cpu-loras) by a, b; unload one"),
        ("", "'' cannot be an adapter's name"),
        ("new\nline", "cannot be an adapter's name"),
    ],
)
def test_invalid_adapter_load_is_rejected_without_effect(
    model: Path, adapter: Folders, name: str, message: str
) -> None:
    engine = an_engine(model, adapters=updatable())
    load(engine, "a", adapter(1))
    load(engine, "b", adapter(2))
    before = tokens(engine, "a"), engine.state().adapters
    status, said = load(engine, name, adapter(3))
    assert status == 400
    assert message in said
    assert (tokens(engine, "a"), engine.state().adapters) == before


def test_an_adapter_that_does_not_fit_leaves_its_place_free(model: Path, adapter: Folders, tmp_path: Path) -> None:
    engine = an_engine(model, adapters=updatable(max_cpu_loras=1))
    for folder, message in (
        (adapter(1, rank=17), "its rank is 17, above --max-lora-rank 16"),
        (an_adapter(tmp_path / "strange", {"model.layers.9.self_attn.q_proj": (64, 64)}), "which this model does not"),
        (str(tmp_path / "nowhere"), "is no folder here"),
    ):
        status, said = load(engine, "a", folder)
        assert status == 400
        assert message in said
    assert load(engine, "a", adapter(2))[0] == 200


def test_unload_of_unknown_adapter_is_rejected(model: Path) -> None:
    engine = an_engine(model, adapters=updatable())
    status, body = engine.unload_adapter(UnloadLora("a"))
    assert (status, body["message"]) == (404, "the adapter a is not loaded; loaded are none")


def test_adapters_are_reloaded_with_weights(model: Path, adapter: Folders) -> None:
    engine = an_engine(model, adapters=updatable())
    load(engine, "a", adapter(1))
    load(engine, "b", adapter(2))
    before = tokens(engine, "a"), tokens(engine, "b")
    gone = Path(adapter(3))
    engine.unload_adapter(UnloadLora("b"))
    load(engine, "c", str(gone))
    engine.unload_adapter(UnloadLora("c"))
    for file in gone.iterdir():
        file.unlink()  # unloaded adapters are not read again
    assert engine.lifecycle(Sleep(2, "abort"))[0] == 200
    engine.step()
    assert load(engine, "d", adapter(4)) == (409, "the engine sleeps and has no weights: wake it up first")
    assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
    assert tokens(engine, "a") == before[0]
    assert load(engine, "b", adapter(2))[0] == 200
    assert tokens(engine, "b") == before[1]


@pytest.mark.parametrize("is_updatable", [True, False])
def test_wake_up_drops_an_unreadable_adapter_by_name(
    model: Path, adapter: Folders, is_updatable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Kept requests of the adapter end with an error; others go on with the same tokens."""
    kept, gone = adapter(1), Path(adapter(2))
    engine = an_engine(model, adapters=served_from_start(kept, str(gone), max_loras=2, is_updatable=is_updatable))
    expected = tokens(engine, "a"), tokens(engine)
    requests = [asked("a", "first"), asked("b", "second"), asked("", "third")]
    for request in requests:
        engine.add(request)
    outputs = [output for _ in range(3) for output in engine.step().outputs]
    assert engine.lifecycle(Sleep(2, "keep"))[0] == 200
    (gone / "adapter_config.json").unlink()
    assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
    assert "adapter b: dropped: " in caplog.text
    while engine.has_work:
        outputs += engine.step().outputs
    ended = {output.request_id: output for output in outputs if output.finish_reason}
    assert "the adapter b could not be read" in ended["second"].error
    found = {name: [t for o in outputs if o.request_id == name for t in o.token_ids] for name in ("first", "third")}
    assert (found["first"], found["third"]) == expected
    assert [card.name for card in engine.state().adapters] == ["a"]


@pytest.mark.parametrize("change", ["gone", "truncated", "config gone"])
def test_wake_up_without_a_file_is_rejected_and_can_be_repeated(
    model: Path, adapter: Folders, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    engine = an_engine(copy, adapters=served_from_start(adapter(1)))
    expected = tokens(engine, "a")
    engine.add(asked("a"))
    outputs = engine.step().outputs
    assert engine.lifecycle(Sleep(2, "keep"))[0] == 200
    file = copy / ("config.json" if change == "config gone" else "model.safetensors")
    content = file.read_bytes()
    file.unlink()
    if change == "truncated":
        file.write_bytes(content[:-100])
    for _ in range(2):
        status, body = engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
        assert (status, "the weights cannot be loaded: " in body["message"]) == (409, True), body
        assert str(copy) in body["message"]
        assert engine.state().sleep_level == 2
    file.write_bytes(content)
    assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
    while engine.has_work:
        outputs += engine.step().outputs
    assert [token for output in outputs for token in output.token_ids] == expected


def test_adapters_in_use_are_reported_once_a_second(model: Path, adapter: Folders) -> None:
    engine = an_engine(model, adapters=served_from_start(adapter(1), adapter(2)))
    engine.add(asked("a", "first", 40))
    engine.add(asked("b", "second"))
    told = engine.step().stats.adapters
    assert told is not None
    assert (told.max_loras, told.running, told.waiting) == (1, ["a"], ["b"])
