"""Keywords of LLM: vLLM's names, read by the parser of `trimtab-engine serve`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine import CompilationConfig, CompilationLevel
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.offline.arguments import flags_to_keywords, read_keywords


def test_keywords_equal_flags() -> None:
    config, *_ = read_keywords(
        "m", {"device": "cpu", "max_num_batched_tokens": 512, "max_num_seqs": 4, "gpu_memory_utilization": 0.5}
    )
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.gpu_memory_utilization) == (512, 4, "0.5")


def test_default_limits_are_those_of_batches() -> None:
    config, *_ = read_keywords("m", {"device": "cpu"})
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 4096)


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (None, True)])
def test_switch_accepts_true_false_and_default(value: bool | None, expected: bool) -> None:
    config, *_ = read_keywords("m", {"device": "cpu", "enable_chunked_prefill": value})
    assert config.enable_chunked_prefill is expected


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"compilation_config": {"level": 1}}, "compilation_config: level 1 .* is torch.compile, which is not"),
        ({"compilation_config": object()}, "compilation_config must be a JSON object"),
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"port": 8000}, "port is a server flag"),
        ({"admin_port": 8001}, "admin_port is a server flag"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens is 4, below max_num_seqs 8"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_invalid_keyword_is_rejected_by_name(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        read_keywords("m", {"device": "cpu", **keywords})
    assert "--" not in str(refusal.value)


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_num_batched_tokens": 16384},
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        {"max_model_len": 2048, "max_num_seqs": 4},
        {"enforce_eager": True},
        {
            "compilation_config": CompilationConfig(
                level=CompilationLevel.PIECEWISE, cudagraph_capture_sizes=(1, 2, 4, 8)
            )
        },
        {"compilation_config": 3, "optimization_level": 1},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048},
    ],
)
def test_tuning_guide_examples_are_valid(keywords: dict[str, Any]) -> None:
    config, *_ = read_keywords("m", {"device": "cpu", **keywords})
    known = {name: value for name, value in keywords.items() if hasattr(config, name)}
    assert known == {name: getattr(config, name) for name in known}


def test_image_guide_examples_are_valid(model_of: Callable[..., Path]) -> None:
    seeing, text = str(model_of(architectures=["Qwen2_5_VLForConditionalGeneration"])), str(model_of())

    def read(model: str, **keywords: Any) -> EngineConfig:
        config, *_ = read_keywords(model, {"device": "cpu", **keywords})
        return config

    assert read(seeing).limit_mm_per_prompt == {"image": 999, "video": 999}
    assert read(seeing).mm_processor_cache_bytes is None
    assert read(seeing, max_num_encoder_input_tokens=64).max_num_encoder_input_tokens == 64
    assert read(seeing, encoder_cache_size=128).encoder_cache_size == 128
    assert read(seeing, mm_processor_cache_gb=8).mm_processor_cache_bytes == 8 << 30
    assert read(seeing, mm_processor_cache_gb=0).mm_processor_cache_bytes == 0
    assert read(seeing, limit_mm_per_prompt={"image": 2}).limit_mm_per_prompt == {"image": 2, "video": 999}
    assert not read(seeing, limit_mm_per_prompt={"image": 0, "video": 0}).modalities
    assert read(seeing, speculative_config={"method": "ngram", "num_speculative_tokens": 2}).modalities
    assert not read(seeing, speculative_config={"method": "mtp", "num_speculative_tokens": 1}).modalities
    assert read(text).limit_mm_per_prompt == {}
    with pytest.raises(ConfigError, match=r"^limit_mm_per_prompt .*: this model only accepts text; remove it"):
        read(text, limit_mm_per_prompt={"image": 2})
    with pytest.raises(ConfigError, match="limit_mm_per_prompt has 'images'; did you mean image"):
        read(seeing, limit_mm_per_prompt={"images": 2})
    with pytest.raises(ConfigError, match=r"mm_processor_cache_gb.* is not a number of GiB"):
        read(seeing, mm_processor_cache_gb=-1)


def test_unsupported_keywords_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        read_keywords("m", {"device": "cpu", "cpu_offload_gb": 8})


def test_keywords_without_effect_are_accepted() -> None:
    read_keywords("m", {"device": "cpu", "tensor_parallel_size": 1, "enforce_eager": True, "trust_remote_code": False})


def test_flags_in_messages_become_keywords() -> None:
    assert flags_to_keywords("raise --max-num-seqs or lower --block-size") == "raise max_num_seqs or lower block_size"


def test_compilation_config_object_gives_its_set_fields() -> None:
    given = CompilationConfig(level=CompilationLevel.PIECEWISE, cudagraph_capture_sizes=(1, 2, 4, 8))
    config, *_ = read_keywords("m", {"device": "cpu", "compilation_config": given})
    assert config.compilation == CompilationConfig(level=3, cudagraph_capture_sizes=(1, 2, 4, 8))
