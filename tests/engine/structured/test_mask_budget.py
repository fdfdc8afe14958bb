"""Turns of requests with expensive grammars, and steps whose masks stay within the budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_builders
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.structured import matcher
from trimtab_engine.structured.mask_budget import MASK_BUDGET_SECONDS, MaskBudget

BUDGET = 1.0


def make_request(seconds: float | None) -> Request:
    request = engine_builders.a_request()
    request.grammar = None if seconds is None else SimpleNamespace(mask_seconds=seconds)
    return request


@given(st.lists(st.none() | st.floats(0.0, 3.0), min_size=1, max_size=12))
def test_each_request_has_its_turn_within_the_budget(costs: list[float | None]) -> None:
    budget, requests = MaskBudget(BUDGET), [make_request(cost) for cost in costs]
    turns = dict.fromkeys(requests, 0)
    for _ in range(len(requests)):
        deferred = budget.deferred(requests)
        computed = [request for request in requests if request not in deferred]
        spent = [request.grammar.mask_seconds for request in computed if request.grammar is not None]
        assert computed
        assert sum(spent) <= BUDGET + 1e-9 or len(computed) == 1
        for request in computed:
            turns[request] += 1
    assert min(turns.values()) >= 1


def test_budget_continues_after_the_last_request_has_ended() -> None:
    budget, requests = MaskBudget(BUDGET), [make_request(0.9) for _ in range(3)]
    assert requests[0] not in budget.deferred(requests)
    assert requests[1] not in budget.deferred(requests[1:])


def test_expensive_grammars_do_not_delay_other_requests(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that each take half the budget: few per step, and the same text as without a limit."""
    fill = matcher.GrammarMatcher.fill

    def slow(self: matcher.GrammarMatcher, address: int, num_bytes: int) -> None:
        fill(self, address, num_bytes)
        self.mask_seconds += MASK_BUDGET_SECONDS / 2

    def run() -> tuple[dict[str, list[int]], int]:
        engine = engine_builders.an_engine(tiny_model, max_num_seqs=16, num_gpu_blocks_override=128)
        sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        grammar = LLMatcher.grammar_from_regex("[a-z]{4,40}")
        for number in range(12):
            params = Sampling(max_tokens=8, grammar=grammar, **sampling)
            engine.add(AddRequest(f"g{number}", [97 + number, 98], params, arrival_time=0.0))
        engine.add(AddRequest("plain", [97, 98, 99], Sampling(max_tokens=24, **sampling), arrival_time=0.0))
        tokens: dict[str, list[int]] = {}
        most = steps = 0
        while engine.has_work or engine.is_building:
            outputs = engine.step().outputs
            steps += 1
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            with_grammar = sum(output.request_id != "plain" for output in outputs)
            most = max(most, with_grammar) if steps > 4 else 0
            assert "plain" not in tokens or len(tokens["plain"]) == 24 or any(o.request_id == "plain" for o in outputs)
        return tokens, most

    expected, _ = run()
    monkeypatch.setattr(matcher.GrammarMatcher, "fill", slow)
    monkeypatch.setattr(
        "trimtab_engine.structured.masks.MaskMaker.seconds", property(lambda self: 1.0, lambda *_: None), raising=False
    )
    tokens, most = run()
    assert tokens == expected
    assert most <= 2
