"""Speculative decoding on the command line: JSON, single fields and short forms say the same."""

import pytest
from trimtab_engine.cli import _parser
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.flags.engine import engine_config

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)


def config(*flags: str) -> EngineConfig:
    return engine_config(_parser().parse_args(["serve", "/models/m", "--device", "cpu", *flags]))


def test_without_flags_there_is_no_speculation() -> None:
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
    ids=["JSON", "fields", "short forms beside JSON"],
)  # fmt: skip
def test_every_way_of_writing_it_gives_the_same(flags: list[str]) -> None:
    assert config(*flags).speculative == NGRAM


def test_the_depth_starts_at_its_cap() -> None:
    started = config("--spec-model", "/models/small", "--spec-tokens", "3")
    assert started.speculative == SpeculativeConfig(
        method="draft_model", model="/models/small", num_speculative_tokens=3
    )
    assert (started.num_speculative_tokens, started.num_speculative_tokens_cap) == (3, 3)


def test_two_flags_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--spec-tokens is 3, but --speculative-config says .* 4; give one"):
        config("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}', "--spec-tokens", "3")


def test_a_method_that_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="method medusa is not supported"):
        config("--spec-method", "medusa", "--spec-tokens", "3")


def test_a_head_over_ranks_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="method mtp with --tensor-parallel-size 2 is not supported"):
        config("--spec-method", "mtp", "--tensor-parallel-size", "2")


def test_an_empty_object_is_not_taken_for_no_speculation() -> None:
    with pytest.raises(ConfigError, match="method is missing"):
        config("--speculative-config", "{}")
