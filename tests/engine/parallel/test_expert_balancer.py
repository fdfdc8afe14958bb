"""Balancing experts while serving: tokens stay the same, hot experts spread over the ranks, and one sees it."""

import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.experts import EplbConfig, eplb_config
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.messages.requests import ExpertBalance, StepStats

pytestmark = pytest.mark.usefixtures("forked")

EP2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
PARTS = 10  # of a window, as the balancer has them


def news_of(steps: list[StepStats]) -> list[ExpertBalance]:
    return [stats.expert_balance for stats in steps if stats.expert_balance is not None]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Return one rank's output."""
    return {}


@pytest.mark.parametrize("num_redundant", [0, 2])
def test_hot_experts_spread_without_changing_tokens(
    num_redundant: int,
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    tight: dict[str, Any],
    expected: dict[str, list[int]],
) -> None:
    serve, requests, check_disturbed = serving
    asked = requests()
    if not expected:
        expected.update(serve(start(models["skewed"]), asked))
    eplb = EplbConfig(window_size=20, step_interval=20, num_redundant_experts=num_redundant)
    engine = start(models["skewed"], **tight, **EP2, eplb=eplb)
    steps: list[StepStats] = []
    assert serve(engine, asked, steps) == expected
    check_disturbed(steps, asked)
    news = news_of(steps)
    first_move = next(index for index, entry in enumerate(news) if entry.moved_bytes)
    measured = [entry.balancedness for entry in news if entry.balancedness is not None]
    before, after = measured[1 : first_move + 1], measured[first_move + 1 :]
    assert len(before) >= PARTS - 2, "it was measured while experts were where they began"
    assert fmean(before) < (0.6 if num_redundant == 0 else 0.8), "a spare copy of two hot experts is there at first"
    assert fmean(after) > fmean(before) + 0.1
    one_expert = 3 * 24 * 48 * 4
    assert news[first_move].moved_bytes % one_expert == 0
    assert sum(entry.num_rearrangements for entry in news) == len(steps) // 20
    assert serve(engine, asked) == expected, "again, with experts where they are by now"
    wire = sum(stats.wire_bytes.get("expert_weights", 0) for stats in steps)
    assert wire >= sum(entry.moved_bytes for entry in news)


def test_stages_rearrange_independently(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, tight: dict[str, Any]
) -> None:
    serve, requests, _ = serving
    asked = requests()
    layout = EP2 | {"pipeline_parallel_size": 2, "eplb": EplbConfig(window_size=5, step_interval=5)}
    steps: list[StepStats] = []
    assert serve(start(models["skewed"], **tight, **layout), asked, steps) == serve(start(models["skewed"]), asked)
    assert sum(entry.moved_bytes for entry in news_of(steps)) > 0


def test_balancedness_is_logged_in_the_words_of_vllm(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serve, requests, _ = serving
    eplb = EplbConfig(window_size=8, step_interval=8, log_balancedness=True, log_balancedness_interval=4)
    with caplog.at_level("INFO", logger="trimtab_engine.eplb"):
        serve(start(models["skewed"], **EP2, eplb=eplb), requests(4))
    lines = [record.getMessage() for record in caplog.records if record.name == "trimtab_engine.eplb"]
    pattern = r"EPLB step: 4, avg_tokens=\d+\.\d\d, max_tokens=\d+, balancedness=0\.\d{4}, steps until .*: 4"
    assert re.fullmatch(pattern, lines[0])
    assert any(re.fullmatch(r"Rearranged experts in \d+\.\d\d seconds: \d+ of them moved", line) for line in lines)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_parallel_size": 2}, "add --enable-expert-parallel"),
        ({"enable_expert_parallel": True}, "tensor x data parallel ranks, and there is 1"),
        (EP2 | {"expert_placement_strategy": "round_robin"}, "--expert-placement-strategy round_robin"),
    ],
)
def test_balancing_without_effect_is_rejected(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="/models/m", eplb=EplbConfig(), **layout)


def test_indivisible_slots_are_rejected_with_valid_number(models: dict[str, str], start: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match=r"8 experts and num_redundant_experts 1 .* 2 ranks; set .* to 2"):
        start(models["skewed"], **EP2, eplb=EplbConfig(num_redundant_experts=1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"window_size": 0}, ConfigError, "window_size is 0; it must be 1"),
        ({"num_redundant_experts": -1}, ConfigError, "num_redundant_experts is -1"),
        ({"step_intervall": 3}, ConfigError, "there is no step_intervall; its fields are window_size, "),
        ({"step_interval": "soon"}, ConfigError, "Expected `int`"),
        ({"use_async": True}, NotSupportedError, "use_async True is not supported; experts are rearranged"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eplb_config(fields)


def test_fields_are_those_of_vllm_with_its_defaults() -> None:
    assert eplb_config({"use_async": False, "policy": "default"}) == EplbConfig(
        window_size=1000,
        step_interval=3000,
        num_redundant_experts=0,
        log_balancedness=False,
        log_balancedness_interval=1,
    )
