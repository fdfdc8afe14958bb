"""Speculative decoding flags: JSON, single fields and short forms are equivalent."""

import pytest
from trimtab_engine.cli import _parser
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.flags.engine import engine_config

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)


def config(*flags: str) -> EngineConfig:
    return engine_config(_parser().parse_args(["serve", "/models/m", "--device", "cpu", *flags]))


def test_speculation_is_off_by_default() -> None:
    assert config().speculative is None
    assert config().num_speculative_tokens_cap == 0


AS_JSON = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config", AS_JSON],
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "4",
         "--speculative-config.prompt-lookup-min=2", "--speculative-config.prompt_lookup_max", "4"],
        ["--spec-method", "ngram", "--spec-tokens", "4",
         "--speculative-config", '{"prompt_lookup_min": 2, "prompt_lookup_max": 4}'],
    ],
    ids=["JSON", "fields", "short forms with JSON"],
)  # fmt: skip
def test_every_notation_gives_the_same_config(flags: list[str]) -> None:
    assert config(*flags).speculative == NGRAM


def test_depth_starts_at_its_cap() -> None:
    started = config("--spec-model", "/models/small", "--spec-tokens", "3")
    assert started.speculative == SpeculativeConfig(
        method="draft_model", model="/models/small", num_speculative_tokens=3
    )
    assert (started.num_speculative_tokens, started.num_speculative_tokens_cap) == (3, 3)


def test_conflicting_flags_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--spec-tokens 3 conflicts with .* 4 of --speculative-config; set only one"):
        config("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}', "--spec-tokens", "3")


def test_unsupported_method_is_rejected() -> None:
    with pytest.raises(NotSupportedError, match="method medusa is not supported"):
        config("--spec-method", "medusa", "--spec-tokens", "3")


def test_draft_head_with_tensor_parallelism_is_rejected() -> None:
    with pytest.raises(NotSupportedError, match="method mtp with --tensor-parallel-size 2 is not supported"):
        config("--spec-method", "mtp", "--tensor-parallel-size", "2")


def test_empty_object_is_rejected() -> None:
    with pytest.raises(ConfigError, match="method is missing"):
        config("--speculative-config", "{}")
