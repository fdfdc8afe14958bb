"""--compilation-config: fields of vLLM, by the names of today and of its guides; the rest is refused by name."""

from typing import Any

import pytest
from trimtab_engine.config.graphs import (
    CompilationConfig,
    CUDAGraphMode,
    compilation_config,
    parse_compilation_json,
)
from trimtab_engine.errors import ConfigError, NotSupportedError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, CompilationConfig()),
        ({"mode": 3}, CompilationConfig(mode=3)),
        ({"mode": "VLLM_COMPILE"}, CompilationConfig(mode=3)),
        ({"level": "PIECEWISE"}, CompilationConfig(level=3)),
        ({"level": 0, "mode": 0}, CompilationConfig(mode=0, level=0)),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)),
        ({"cudagraph_mode": "none"}, CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)),
        ({"cudagraph_capture_sizes": [1, 2]}, CompilationConfig(cudagraph_capture_sizes=(1, 2))),
        ({"use_inductor": False, "backend": "", "pass_config": {}}, CompilationConfig()),  # no effect
        ({"cudagraph_lazy_capture": True}, CompilationConfig(cudagraph_lazy_capture=True)),
    ],
)
def test_vllms_fields_are_understood(values: dict[str, Any], expected: CompilationConfig) -> None:
    assert compilation_config(values) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": 1}, r"mode 1 \(STOCK_TORCH_COMPILE\) is torch.compile, which is not supported"),
        ({"level": "DYNAMO_ONCE"}, "level 2 .* is torch.compile"),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode full is not supported: .* use none, piecewise"),
        ({"backend": "inductor"}, "backend 'inductor' is not supported"),
        ({"compile_sizes": [1]}, "compile_sizes .* is not supported"),
    ],
)
def test_unsupported_vllm_values_are_rejected_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        compilation_config(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": 7}, "mode is 7; it must be 0 to 3"),
        ({"mode": "fast"}, "there is no mode 'fast'"),
        ({"mode": 0, "level": 3}, "mode is 0, but level, its older name, is 3"),
        ({"cudagraph_mode": "half"}, "there is no cudagraph_mode 'half'"),
        ({"cudagraph_capture_sizes": [0]}, "has 0; sizes are 1 to"),
        ({"cudagraph_capture_sizes": "1"}, "Expected `array"),
        ({"cudagraph_capture_sizes": [4], "max_cudagraph_capture_size": 8}, "leave one of them out"),
        ({"max_cudagraph_capture_size": -1}, "is -1"),
        ({"cudagraphs": True}, "has no field 'cudagraphs'; its fields are mode"),
    ],
)
def test_invalid_values_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compilation_config(values)


@pytest.mark.parametrize(("text", "values"), [("3", {"mode": 3}), ('{"mode": 0}', {"mode": 0})])
def test_a_number_is_the_mode(text: str, values: dict[str, Any]) -> None:
    assert parse_compilation_json(text) == values


@pytest.mark.parametrize("text", ["true", "[1]", "full", '"none"'])
def test_anything_else_is_no_configuration(text: str) -> None:
    with pytest.raises(ConfigError, match="--compilation-config"):
        parse_compilation_json(text)
