"""Tasks of an engine by flags and checkpoint."""

from typing import Any

import pytest
from trimtab_engine.config.pooling import (
    CheckpointPooling,
    PoolerConfig,
    Runner,
    parse_pooler_json,
    tasks_of,
)
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.scheduling.pooling import Pooling

SILENT, EMBEDS = CheckpointPooling(), CheckpointPooling("MEAN", normalize=False, where="modules.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", PoolerConfig()),
        ('{"pooling_type": "mean"}', PoolerConfig(pooling_type="MEAN")),
        ('{"seq_pooling_type": "LAST", "use_activation": false}', PoolerConfig(pooling_type="LAST", normalize=False)),
        ('{"normalize": true, "dimensions": 64}', PoolerConfig(normalize=True, dimensions=64)),
        ('{"normalize": true, "use_activation": true}', PoolerConfig(normalize=True)),
    ],
)
def test_the_flag_takes_vllm_s_names_old_and_new(text: str, expected: PoolerConfig) -> None:
    assert parse_pooler_json(text) == expected


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("[]", ConfigError, "--pooler-config must be a JSON object, such as"),
        ('{"pooling_type": "CLS"}', NotSupportedError, "CLS is not supported: the first token of a decoder"),
        ('{"pooling_type": "ALL"}', NotSupportedError, "ALL is not supported: vectors of all tokens are not given"),
        ('{"pooling_type": "STEP"}', NotSupportedError, "STEP is not supported: models that reward steps"),
        ('{"pooling_type": "MAX"}', NotSupportedError, "MAX is not supported; supported are LAST, MEAN"),
        ('{"pooling_type": 3}', ConfigError, "Expected `str.*pooling_type"),
        ('{"dimensions": 0}', ConfigError, "dimensions is 0; it must be 1 or more"),
        ('{"step_tag_id": 3}', NotSupportedError, "step_tag_id is not supported; its fields are pooling_type"),
        ('{"normalize": true, "use_activation": false}', ConfigError, "normalize is given twice with different values"),
    ],
)
def test_invalid_or_unsupported_pooling_is_named(text: str, error: type[ConfigError], said: str) -> None:
    with pytest.raises(error, match=said):
        parse_pooler_json(text)


@pytest.mark.parametrize(
    ("runner", "said", "has_output_layer", "pools", "generates"),
    [
        ("auto", SILENT, True, True, True),
        ("auto", EMBEDS, True, True, False),
        ("auto", SILENT, False, True, False),
        ("generate", SILENT, True, False, True),
        ("pooling", SILENT, True, True, False),
        ("pooling", SILENT, False, True, False),
    ],
)
def test_both_tasks_by_default(
    runner: Runner, said: CheckpointPooling, has_output_layer: bool, pools: bool, generates: bool
) -> None:
    tasks = tasks_of(runner, PoolerConfig(), said, 64, has_output_layer=has_output_layer)
    assert (not tasks.no_pooling, not tasks.no_generation) == (pools, generates)


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        (PoolerConfig(), {}, Pooling("mean", None, normalize=False)),
        (PoolerConfig(pooling_type="LAST", normalize=True), {}, Pooling("last", None, normalize=True)),
        (PoolerConfig(dimensions=8), {}, Pooling("mean", 8, normalize=False)),
        (PoolerConfig(dimensions=8), {"dimensions": 16, "normalize": True}, Pooling("mean", 16, normalize=True)),
    ],
)
def test_pooling_precedence_request_flag_checkpoint(
    config: PoolerConfig, asked: dict[str, Any], expected: Pooling
) -> None:
    tasks = tasks_of("auto", config, EMBEDS, 64, has_output_layer=True)
    assert tasks.pooler.pooling(**asked) == expected


def test_generating_model_ignores_unsupported_pooling() -> None:
    said = CheckpointPooling("CLS", where="modules.json")
    assert tasks_of("generate", PoolerConfig(), said, 64, has_output_layer=True).no_generation == ""
    with pytest.raises(NotSupportedError, match=r"modules\.json: pooling type CLS is not supported"):
        tasks_of("auto", PoolerConfig(), said, 64, has_output_layer=True)
