"""Flags of adapters, and their conflicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_folders import an_adapter
from trimtab_engine.cli import main
from trimtab_engine.config.adapters import AdapterConfig, AdapterModule
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.flags.adapters import adapter_config
from trimtab_engine.flags.parser import OneLineParser
from trimtab_engine.flags.serve import add_serve_flags


def config_of(*flags: str) -> AdapterConfig | None:
    parser = OneLineParser(prog="serve")
    add_serve_flags(parser)
    return adapter_config(parser.parse_args(["/model", *flags]))


def make_module(name: str, path: str = "/a", **fields: Any) -> AdapterModule:
    return AdapterModule(name=name, path=path, **fields)


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ((), None),
        (("--no-enable-lora",), None),
        (("--enable-lora",), AdapterConfig()),
        (("--enable-lora", "--max-loras", "3", "--max-lora-rank", "64"), AdapterConfig(max_loras=3, max_lora_rank=64)),
        (
            ("--enable-lora", "--lora-modules", "a=/a", "b=/b=c"),
            AdapterConfig(modules=(make_module("a"), make_module("b", "/b=c"))),
        ),
        (
            ("--enable-lora", "--lora-modules", '{"name": "a", "path": "/a", "base_model_name": "m"}'),
            AdapterConfig(modules=(make_module("a", base_model_name="m"),)),
        ),
        (
            ("--enable-lora", "--lora-modules", '[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]'),
            AdapterConfig(modules=(make_module("a"), make_module("b", "/b"))),
        ),
        (
            ("--enable-lora", "--max-cpu-loras", "4", "--allow-runtime-lora-updating"),
            AdapterConfig(max_cpu_loras=4, is_updatable=True),
        ),
    ],
)  # fmt: skip
def test_flags_are_vllm_s(flags: tuple[str, ...], config: AdapterConfig | None) -> None:
    assert config_of(*flags) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-modules", "a=/a"), "--lora-modules requires --enable-lora; add --enable-lora"),
        (("--max-loras", "2"), "--max-loras requires --enable-lora"),
        (("--allow-runtime-lora-updating",), "--allow-runtime-lora-updating requires --enable-lora"),
        (("--enable-lora", "--lora-modules", "a"), "'a' is not an adapter; use NAME=PATH"),
        (("--enable-lora", "--lora-modules", "a="), "'a=' is not an adapter"),
        (("--enable-lora", "--lora-modules", "=/a"), "'' cannot be an adapter's name"),
        (("--enable-lora", "--lora-modules", "{"), "--lora-modules is not JSON"),
        (("--enable-lora", "--lora-modules", "[1]"), "each adapter must be a JSON object"),
        (("--enable-lora", "--lora-modules", '{"name": "a"}'), "missing required field `path`"),
        (
            ("--enable-lora", "--lora-modules", '{"name": "a", "path": "/a", "x": 1}'),
            "x is not supported; the fields are",
        ),
        (("--enable-lora", "--lora-modules", '{"name": 1, "path": "/a"}'), "Expected `str`, got `int`"),
        (("--enable-lora", "--lora-modules", "a=/a", "a=/b"), "names the adapter a twice"),
        (("--enable-lora", "--lora-modules", "a=hf://o/a"), "a is at hf://o/a, and adapters are not fetched"),
        (("--enable-lora", "--max-loras", "2000"), "--max-loras is 2000; it must be between 1 and 1024"),
        (("--enable-lora", "--max-lora-rank", "9000"), "--max-lora-rank is 9000"),
        (
            ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "1"),
            "--max-cpu-loras is 1, but --max-loras is 2 and --lora-modules names 0",
        ),
        (
            ("--enable-lora", "--max-cpu-loras", "1", "--lora-modules", "a=/a", "b=/b"),
            "names 2: all of them are kept in memory; raise it to 2, or leave it out",
        ),
    ],
)
def test_conflicting_adapter_flags_are_named_in_error(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(*flags)
    assert message in str(error.value)


def test_max_cpu_loras_default_covers_modules_and_max_loras() -> None:
    modules = (make_module("a"), make_module("b"), make_module("c"))
    assert AdapterConfig(modules=modules).capacity == 3
    assert AdapterConfig(modules=modules, max_loras=5).capacity == 5
    assert AdapterConfig(max_cpu_loras=7).capacity == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapters": AdapterConfig(is_updatable=True), "data_parallel_size_cap": 2},
            "--allow-runtime-lora-updating with --data-parallel-size-cap is not supported",
        ),
    ],
)
def test_adapters_are_rejected_by_unsupported_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        EngineConfig(**{"model": "/model", "adapters": AdapterConfig(), **changes})


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("stub={}", "--lora-modules: stub is the name of the base model; rename the adapter"),
        ('{{"name": "a", "path": "{}", "base_model_name": "b"}}', "base_model_name b of a does not match the"),
        ("a=/nowhere", "adapter /nowhere: is no folder here"),
    ],
)  # fmt: skip
def test_serve_rejects_adapters_before_start(
    tiny_model: Path, tmp_path: Path, module: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = an_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (64, 64)})
    flags = ["--served-model-name", "stub", "--device", "cpu", "--load-format", "dummy", "--enable-lora"]
    assert main(["serve", str(tiny_model), *flags, "--lora-modules", module.format(folder)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--fully-sharded-loras", "--enable-lora-bias", "--default-mm-loras"])
def test_unsupported_vllm_lora_flag_is_rejected(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of("--enable-lora", flag)
    assert f"{flag} is not supported" in capsys.readouterr().err
