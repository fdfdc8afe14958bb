"""Grammars in the complete engine with a tiny random model: the output matches, despite preemption, drafts and
aborts.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from calling_recorder import all_steps_follow, steps_of_a_device
from llguidance import LLMatcher
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.requests import AddRequest, SequenceOutput
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs, token_mask

END = 256
MAX_STEPS = 100_000  # an engine waiting for a grammar takes many empty steps
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "on": {"type": "boolean"},
    },
    "required": ["name", "size", "tags", "on"],
    "additionalProperties": False,
}
JSON_GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


an_engine = partial(engine_builders.an_engine, max_model_len=256, num_gpu_blocks_override=256)


def make_request(name: str, grammar: str, **sampling: Any) -> AddRequest:
    request_fields = {"max_tokens": 200, "grammar": grammar, "temperature": 1.0, "ignore_eos": False, **sampling}
    return engine_builders.a_new_request(name, b"what", **request_fields)


def serve(engine: Engine, *requests: AddRequest) -> dict[str, list[SequenceOutput]]:
    """Run these requests to the end and return all their outputs."""
    outputs: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(MAX_STEPS):
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
        if not (engine.has_work or engine.is_building):
            return outputs
    raise AssertionError("the requests did not end")


def text(outputs: list[SequenceOutput]) -> str:
    """Return the text as the API server does: the stop token has no text, unless marked."""
    tokens = [token for output in outputs for token in output.token_ids]
    if outputs[-1].finish_reason == "stop" and not outputs[-1].ends_with_text:
        tokens.pop()
    return bytes(tokens).decode()


def conforms(document: str) -> bool:
    value = json.loads(document)
    return (
        value.keys() == set(SCHEMA["required"])
        and len(value["name"]) <= 12
        and value["size"] in range(100)
        and set(value["tags"]) <= {"red", "green", "blue"}
        and len(value["tags"]) <= 3
        and isinstance(value["on"], bool)
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_model_generates_json_of_the_schema(tiny_model: Path, seed: int) -> None:
    engine = an_engine(tiny_model, seed=seed)
    requests = [make_request(f"r{n}", JSON_GRAMMAR, seed=n, temperature=1.5) for n in range(8)]
    for outputs in serve(engine, *requests).values():
        assert outputs[-1].finish_reason == "stop"
        assert conforms(text(outputs))


@pytest.mark.parametrize("regex", [r"[0-9]{3}-[0-9]{4}", r"(yes|no|perhaps)", r"[a-zé]{2,5}@[a-z]{2,5}\.(com|org)"])
def test_any_model_generates_regex_matches(tiny_model: Path, regex: str) -> None:
    requests = [make_request(f"r{n}", LLMatcher.grammar_from_regex(regex), seed=n) for n in range(4)]
    for outputs in serve(an_engine(tiny_model), *requests).values():
        assert outputs[-1].finish_reason == "stop"
        assert re.fullmatch(regex, text(outputs))


def test_requests_with_and_without_grammar_share_a_step(tiny_model: Path) -> None:
    engine = an_engine(tiny_model)
    plain = AddRequest("plain", list(b"what"), Sampling(max_tokens=20, temperature=0.0, ignore_eos=True), 0.0)
    alone = serve(engine, plain)["plain"]
    together = serve(engine, make_request("grammar", LLMatcher.grammar_from_regex("[ab]{9}")), plain)
    assert re.fullmatch("[ab]{9}", text(together["grammar"]))
    assert [o.token_ids for o in together["plain"]] == [o.token_ids for o in alone]


def test_preempted_requests_keep_their_grammar_position(tiny_model: Path) -> None:
    requests = [make_request(f"r{n}", LLMatcher.grammar_from_regex("[a-z]{50}"), seed=n) for n in range(6)]
    roomy = serve(an_engine(tiny_model), *requests)
    tight = serve(an_engine(tiny_model, num_gpu_blocks_override=33), *requests)
    assert sum(outputs[-1].num_preemptions for outputs in tight.values()) > 0
    for name, outputs in tight.items():
        assert re.fullmatch("[a-z]{50}", text(outputs))
        assert text(outputs) == text(roomy[name])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_drafts_allowed_by_grammar_are_accepted(tiny_model: Path, ignore_eos: bool) -> None:
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
    speculation: dict[str, Any] = {"speculative": ngram, "num_speculative_tokens": 4, "num_speculative_tokens_cap": 4}
    requests = [
        make_request(f"r{n}", LLMatcher.grammar_from_regex(regex), temperature=0.0, ignore_eos=ignore_eos)
        for n, regex in enumerate(("(ab ){15}", "(ab ){3}[0-9]{2}(ab ){6}", "[a-z]{30}"))
    ]
    plain = serve(an_engine(tiny_model), *requests)
    drafted = serve(an_engine(tiny_model, **speculation), *requests)
    for name, outputs in drafted.items():
        assert text(outputs) == text(plain[name])
        assert outputs[-1].finish_reason == "stop"
    assert len(drafted["r0"]) < len(plain["r0"]) / 2  # steps


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 3}, {}, {"min_tokens": 20}], ids=str)
def test_drafts_of_unconstrained_model_keep_the_grammar(tiny_model: Path, sampling: dict[str, Any]) -> None:
    """Drafts that the grammar forbids are rejected, also sampled ones, and those beyond its end."""
    itself = SpeculativeConfig(method="draft_model", model=str(tiny_model), num_speculative_tokens=4)
    speculation: dict[str, Any] = {"speculative": itself, "num_speculative_tokens": 4, "num_speculative_tokens_cap": 4}
    regexes = ("[a-z]{8}", "(yes|no|perhaps)", "(ab ){6}", "(.|\\n){1,12}")
    requests = [
        make_request(f"r{n}", LLMatcher.grammar_from_regex(regex), **sampling) for n, regex in enumerate(regexes)
    ]
    drafted = serve(an_engine(tiny_model, **speculation), *requests)
    for (name, outputs), regex in zip(drafted.items(), regexes, strict=True):
        assert outputs[-1].finish_reason == "stop", name
        assert re.fullmatch(regex, text(outputs)), name
    if "temperature" in sampling or "seed" in sampling:
        plain = serve(an_engine(tiny_model), *requests)
        assert {n: text(o) for n, o in drafted.items()} == {n: text(o) for n, o in plain.items()}


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_k": 20, "repetition_penalty": 1.3, "logprobs": 2},
    {"seed": 3, "min_tokens": 20, "logit_bias": {END: 5.0}},
    {"temperature": 0.0, "ignore_eos": True, "bad_words": ((32,), (97, 98))},
    {"seed": 4, "max_tokens": 7, "presence_penalty": 0.5},
]
REGEXES = ("[a-z]{60}", "(yes|no|perhaps)", "(.|\\n){1,12}", "[0-9]{3}-[0-9]{4}", "[a-f]{1,30}")


def mixed_requests() -> list[AddRequest]:
    """Return requests with and without a grammar, some of each greedy, seeded, penalized and with logprobs."""
    held = [
        make_request(f"held {n}", LLMatcher.grammar_from_regex(REGEXES[n % len(REGEXES)]), **MIXED[n % len(MIXED)])
        for n in range(15)
    ]
    prompt = b"what else is there to say about it"
    free = [
        engine_builders.a_new_request(f"free {n}", prompt[n:], **{"max_tokens": 40, "seed": n, **MIXED[n % len(MIXED)]})
        for n in range(15)
    ]
    return [request for pair in zip(held, free, strict=True) for request in pair]


@pytest.mark.parametrize("num_blocks", [256, 33], ids=["", "preempting"])
def test_pipelined_steps_with_grammars_match_others(tiny_model: Path, num_blocks: int) -> None:
    """The forward pass is queued before the grammars have accepted the previous step's tokens."""
    expected = serve(an_engine(tiny_model), *mixed_requests())
    with steps_of_a_device():
        engine = an_engine(tiny_model, async_scheduling=True, num_gpu_blocks_override=num_blocks)
        found = all_steps_follow(engine, lambda: serve(engine, *mixed_requests()))
    assert (sum(outputs[-1].num_preemptions for outputs in found.values()) > 0) == (num_blocks == 33)
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs), name
        assert found[name][-1].finish_reason == outputs[-1].finish_reason, name
        assert [r.token_ids for r in reports_of(found[name])] == [r.token_ids for r in reports_of(outputs)], name


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def reports_of(outputs: list[SequenceOutput]) -> list[TokenLogprobs]:
    return [report for output in outputs for report in output.logprobs or []]


def test_grammar_end_finishes_request_with_last_token_as_text(tiny_model: Path) -> None:
    (outputs,) = serve(an_engine(tiny_model), make_request("r", LLMatcher.grammar_from_regex("abc"))).values()
    assert [output.token_ids for output in outputs] == [[97], [98], [99]]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].ends_with_text


@pytest.mark.parametrize("sampling", [{"min_tokens": 10}, {"ignore_eos": True}, {"max_tokens": 3}])
def test_grammar_end_takes_precedence_over_other_rules(tiny_model: Path, sampling: dict[str, Any]) -> None:
    request = make_request("r", LLMatcher.grammar_from_regex("abc"), **sampling)
    (outputs,) = serve(an_engine(tiny_model), request).values()
    assert text(outputs) == "abc"
    assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_sequence_ends_an_open_grammar(tiny_model: Path, ignore_eos: bool) -> None:
    grammar = LLMatcher.grammar_from_regex("a{1,50}")
    request = make_request("r", grammar, logit_bias={END: 100.0}, ignore_eos=ignore_eos)
    (outputs,) = serve(an_engine(tiny_model), request).values()
    assert text(outputs) == "a"
    assert outputs[-1].token_ids == [END]
    assert outputs[-1].finish_reason == "stop"


def test_max_tokens_truncates_the_grammar(tiny_model: Path) -> None:
    (outputs,) = serve(
        an_engine(tiny_model), make_request("r", LLMatcher.grammar_from_regex("[a-z]{50}"), max_tokens=5)
    ).values()
    assert outputs[-1].finish_reason == "length"
    assert re.fullmatch("[a-z]{5}", text(outputs))


def test_failing_grammar_only_ends_its_request(tiny_model: Path) -> None:
    bad = make_request("bad", LLMatcher.grammar_from_regex("(a"))
    forbidden = make_request("forbidden", LLMatcher.grammar_from_regex("abc"), allowed_tokens=token_mask((120,)))
    good = make_request("good", LLMatcher.grammar_from_regex("abc"))
    outputs = serve(an_engine(tiny_model), bad, forbidden, good)
    assert [outputs[name][-1].finish_reason for name in ("bad", "forbidden", "good")] == ["error", "error", "stop"]
    assert text(outputs["good"]) == "abc"
