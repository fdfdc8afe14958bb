"""The installed engine: command, API server, and real core with a tiny random model."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import waiting

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

DEADLINE_SECONDS = 120.0  # generous, for busy machines
LIMITS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "128")
END_SECONDS = 60.0  # for everything to exit after a kill: usually a second, more on a busy machine
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def engine(tiny_model: Path, real_engine: "type[RealEngine]") -> "Iterator[RealEngine]":
    engine = real_engine(tiny_model, tiny_model / "log", *LIMITS)
    yield engine
    engine.end()


@pytest.fixture
def client(engine: "RealEngine") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**{**given, **fields})


def test_greedy_text_is_reproducible_streamed_and_complete(client: openai.OpenAI) -> None:
    whole = complete(client)
    streamed = complete(client, stream=True, stream_options={"include_usage": True})
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 40
    assert complete(client).choices[0].text == whole.choices[0].text


def test_unexplained_memory_is_small(engine: "RealEngine") -> None:
    assert abs(engine.memory()["unattributed_bytes"]) < 64 << 20


def test_logprobs_are_sorted_and_start_with_chosen_token(client: openai.OpenAI) -> None:
    logprobs = complete(client, max_tokens=3, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == 3
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values()) <= 0


def test_prompt_can_be_scored_without_generation(engine: "RealEngine", client: openai.OpenAI) -> None:
    scored = complete(client, prompt=[PROMPT, "the slow"], echo=True, max_tokens=0, logprobs=1, extra_body={})
    assert [choice.text for choice in scored.choices] == [PROMPT, "the slow"]
    values = scored.choices[0].logprobs.token_logprobs
    assert values[0] is None
    assert len(values) == len(PROMPT)
    assert all(value < 0 for value in values[1:])
    again = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices[0].model_extra["prompt_logprobs"]
    assert [next(iter(entry.values()))["logprob"] for entry in again[1:]] == pytest.approx(values[1:], abs=1e-3)


def test_repeated_prompt_counts_as_cached(client: openai.OpenAI) -> None:
    for cached in (0, 32):
        usage = complete(client, prompt="x" * 40, max_tokens=1).usage
        assert usage.prompt_tokens_details.cached_tokens == cached
    salted = complete(client, prompt="x" * 40, max_tokens=1, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_seed_reproduces_choices(client: openai.OpenAI) -> None:
    first, again = (complete(client, temperature=1, seed=7, n=3) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3


def test_preempted_requests_yield_the_same_text(engine: "RealEngine", client: openai.OpenAI) -> None:
    alone = complete(client, max_tokens=200).choices[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(complete(client, max_tokens=200).choices[0].text))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert texts == [alone] * 8
    lines = engine.http.get("/metrics").text.splitlines()
    preempted = [line for line in lines if line.startswith("vllm:num_preemptions_total{")]
    assert float(preempted[0].split()[-1]) > 0


def test_invalid_requests_do_not_affect_others(engine: "RealEngine", client: openai.OpenAI) -> None:
    expected = complete(client, max_tokens=200).choices[0].text
    stream = complete(client, max_tokens=200, stream=True)
    text = next(stream).choices[0].text
    faults: list[Any] = [
        {"prompt": "a" * 600},
        {"prompt": ""},
        {"temperature": "x"},
        {"n": 10**9},
        {"stop": ["x"] * 999},
    ]
    for fault in faults:
        answer = engine.http.post("/v1/completions", json={"prompt": "a", **fault})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert text + "".join(chunk.choices[0].text for chunk in stream) == expected


@pytest.mark.parametrize("num_requests", [1, 6])  # six of 200 tokens do not fit: some wait in the queue
def test_client_disconnects_free_blocks(engine: "RealEngine", client: openai.OpenAI, num_requests: int) -> None:
    streams = [complete(client, max_tokens=230, stream=True) for _ in range(num_requests)]
    for stream in streams:
        stream.close()
    engine.wait_for(lambda: engine.memory()["kv"]["blocks_used"] == 0, "free blocks")
    assert engine.memory()["kv"]["blocks_free"] == 40


def test_live_change_under_load_takes_effect_without_failures(engine: "RealEngine", client: openai.OpenAI) -> None:
    with closing(complete(client, max_tokens=200, stream=True)) as stream:
        next(stream)
        before = engine.admin.get("/admin/v1/config").json()
        answer = engine.admin.patch("/admin/v1/config", json={"max_num_seqs": 2})
        assert answer.status_code == 200
        assert answer.json()["generation"] == before["generation"] + 1
        stale = engine.admin.patch("/admin/v1/config", json={"max_num_seqs": 3}, headers={"If-Match": "1"})
        assert stale.status_code == 412
        beyond = engine.admin.patch("/admin/v1/config", json={"max_num_seqs": 10**30})
        assert (beyond.status_code, beyond.json()["nearest"]) == (422, 16)
        trial = engine.admin.patch("/admin/v1/config?dry_run=1", json={"max_num_seqs": 4}).json()
        assert (trial["desired"]["max_num_seqs"], trial["applied_at_step"]) == (4, None)
        assert engine.admin.get("/admin/v1/config").json()["applied"]["max_num_seqs"] == 2
        assert len(list(stream)) >= 1


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["on", "level"],
    "additionalProperties": False,
}
AS_RESPONSE_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "lamp", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(("level", "sleep_state"), [(0, "awake"), (1, "weights_offloaded"), (2, "discard_all")])
def test_requests_survive_sleep_under_load(
    engine: "RealEngine", client: openai.OpenAI, level: int, sleep_state: str
) -> None:
    expected = complete(client, max_tokens=100).choices[0].text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(complete(client, max_tokens=100).choices[0].text))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    engine.wait_for(lambda: engine.memory()["kv"]["blocks_used"] > 0, "requests to run")
    answer = engine.admin.post(f"/sleep?level={level}&mode=keep")
    assert (answer.status_code, answer.json()["sleep_level"]) == (200, level), answer.text
    assert f"is asleep at level {level}" in engine.http.get("/readyz").json()["reason"]
    assert engine.admin.get("/is_sleeping").json()["is_sleeping"] is True
    gauge = f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{sleep_state}"}} 1.0'
    assert gauge in engine.http.get("/metrics").text
    threads.append(threading.Thread(target=lambda: texts.append(complete(client, max_tokens=100).choices[0].text)))
    threads[-1].start()  # is queued
    assert engine.admin.post("/wake_up").json()["is_sleeping"] is False
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert texts == [expected] * 7
    assert engine.http.get("/readyz").status_code == 200


def test_pause_wait_returns_after_running_requests(engine: "RealEngine", client: openai.OpenAI) -> None:
    texts: list[str] = []
    running = threading.Thread(target=lambda: texts.append(complete(client, max_tokens=150).choices[0].text))
    running.start()
    engine.wait_for(lambda: engine.memory()["kv"]["blocks_used"] > 0, "the request to run")
    answer = engine.admin.post("/admin/v1/pause", json={"mode": "wait"}).json()
    assert (answer["is_paused"], answer["remaining_requests"]) == (True, 0)
    running.join(DEADLINE_SECONDS)
    assert len(texts) == 1
    refused = engine.http.post("/v1/completions", json={"prompt": PROMPT})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert engine.admin.post("/admin/v1/resume").json()["is_paused"] is False
    assert complete(client, max_tokens=150).choices[0].text == texts[0]


def test_pause_abort_ends_running_requests(engine: "RealEngine", client: openai.OpenAI) -> None:
    reasons: list[Any] = []
    running = threading.Thread(target=lambda: reasons.append(complete(client, max_tokens=200).choices[0].finish_reason))
    running.start()
    engine.wait_for(lambda: engine.memory()["kv"]["blocks_used"] > 0, "the request to run")
    assert engine.admin.post("/pause").json()["remaining_requests"] == 0
    running.join(DEADLINE_SECONDS)
    assert reasons == ["abort"]
    assert engine.admin.post("/reset_prefix_cache").json() == {"reset": True}
    assert engine.admin.post("/resume").status_code == 200


def test_json_schema_is_enforced_streamed_and_complete(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the lamp"}],
        "max_tokens": 200,
        "response_format": AS_RESPONSE_FORMAT,
        "n": 3,
        "seed": 1,
        "extra_body": {"min_tokens": 150},  # the grammar's end takes precedence
    }
    whole = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in whole.choices]
    for text in texts:
        lamp = json.loads(text)
        assert lamp.keys() == {"on", "level"}
        assert lamp["level"] in range(10)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
    ],
)
def test_regex_choice_and_grammar_are_enforced(client: openai.OpenAI, constraint: Any, pattern: str) -> None:
    answer = complete(client, max_tokens=100, temperature=1, logprobs=1, extra_body=constraint).choices[0]
    if answer.finish_reason == "stop":
        assert re.fullmatch(pattern, answer.text)
    assert "".join(answer.logprobs.tokens).startswith(answer.text)


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_regex": "(a"},
        {"guided_json": {"type": "integer", "multipleOf": 999983}},  # builds for 9 s
        {"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'},
    ],
)
def test_endless_grammar_is_400_and_engine_continues(client: openai.OpenAI, constraint: Any) -> None:
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, extra_body=constraint)
    assert refused.value.param == next(iter(constraint))
    assert time.monotonic() - began < DEADLINE_SECONDS
    assert complete(client, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    "restriction", [{"allowed_token_ids": [97]}, {"bad_words": ["x"]}], ids=["allowed_token_ids", "bad_words"]
)
def test_grammar_conflicting_with_restrictions_is_400(client: openai.OpenAI, restriction: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(restriction))):
        complete(client, extra_body={"guided_regex": "x+", **restriction})
    many = {f"key{number}": {"type": "string"} for number in range(1000)}  # passes validation, exceeds a limit later
    with pytest.raises(openai.BadRequestError, match="grammar"):
        complete(client, max_tokens=100, extra_body={"guided_json": {"type": "object", "properties": many}})


TOOL: Any = {"type": "function", "function": {"name": "set", "parameters": SCHEMA}}


@pytest.mark.usefixtures("forked")
def test_required_and_named_tool_choice_are_enforced(
    tiny_model: Path, tmp_path: Path, real_engine: "type[RealEngine]"
) -> None:
    template = "{% if tools %}{{ tools | length }}{% endif %}{{ messages[0].content }}"
    engine = real_engine(tiny_model, tmp_path / "log", *LIMITS, "--chat-template", template)
    try:
        with openai.OpenAI(base_url=f"{engine.http.base_url}/v1", api_key="none", max_retries=0) as client:
            for choice in ("required", {"type": "function", "function": {"name": "set"}}):
                fields: Any = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "on"}],
                    "tools": [TOOL],
                }
                fields |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
                answer = client.chat.completions.create(**fields).choices[0]
                (call,) = answer.message.tool_calls
                assert (answer.finish_reason, call.function.name) == ("tool_calls", "set")
                assert json.loads(call.function.arguments).keys() == {"on", "level"}
                deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
                parts = [part for delta in deltas for part in delta.tool_calls or []]
                assert json.loads("".join(part.function.arguments for part in parts)).keys() == {"on", "level"}
    finally:
        engine.end()


def test_biases_allowed_tokens_and_bad_words_take_effect(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=4, logit_bias={"120": 100}).choices[0].text == "xxxx"
    assert set(complete(client, extra_body={"allowed_token_ids": [97, 98]}).choices[0].text) <= {"a", "b"}
    text = complete(client, max_tokens=4, logit_bias={"120": 100, "121": 99}, extra_body={"bad_words": ["xx"]})
    assert text.choices[0].text == "xyxy"


def test_two_servers_give_same_text_and_stop_together(
    tiny_model: Path, client: openai.OpenAI, tmp_path: Path, real_engine: "type[RealEngine]"
) -> None:
    expected = complete(client).choices[0].text
    pair = real_engine(tiny_model, tmp_path / "log", *LIMITS, "--api-server-count", "2")
    try:
        texts = []
        for _ in range(6):  # each on its own connection
            with openai.OpenAI(base_url=f"{pair.http.base_url}/v1", api_key="none", max_retries=0) as one:
                texts.append(complete(one).choices[0].text)
        assert texts == [expected] * 6
        lines = pair.http.get("/metrics").text.splitlines()
        assert [line.split()[-1] for line in lines if line.startswith("vllm:generation_tokens_total{")] == ["240.0"]
        processes = Path(f"/proc/{pair.process.pid}/task/{pair.process.pid}/children").read_text().split()
        servers = [
            pid for pid in processes if b"api.serving.server_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(int(servers[0]), signal.SIGKILL)
        assert pair.process.wait(END_SECONDS) == 1
        waiting.until_gone(int(pid) for pid in processes)
    finally:
        pair.end()


@pytest.mark.usefixtures("forked")
def test_drafts_only_change_number_of_steps(
    engine: "RealEngine", client: openai.OpenAI, tiny_model: Path, real_engine: "type[RealEngine]"
) -> None:
    """The model is its own draft model: every draft is accepted, a chunk has several tokens; at depth 0 there are
    none.
    """
    expected = complete(client, logprobs=1).choices[0]
    flags = ["--spec-model", str(tiny_model), "--spec-tokens", "3", "--stats-interval-seconds", "1"]
    speculating = real_engine(tiny_model, tiny_model / "log-drafts", *LIMITS, *flags)
    try:
        with openai.OpenAI(base_url=f"{speculating.http.base_url}/v1", api_key="none", max_retries=0) as other:
            answer = complete(other, logprobs=1).choices[0]
            chunks = [chunk for chunk in complete(other, stream=True) if chunk.choices and chunk.choices[0].text]
            accepted = counter(speculating, "vllm:spec_decode_num_accepted_tokens_total")
            assert answer.text == expected.text == "".join(chunk.choices[0].text for chunk in chunks)
            assert answer.logprobs.tokens == expected.logprobs.tokens
            assert len(chunks) < 20, "40 tokens, up to 4 in a chunk"
            assert accepted == counter(speculating, "vllm:spec_decode_num_draft_tokens_total") > 40
            depth = {"num_speculative_tokens": 0}
            assert speculating.admin.patch("/admin/v1/config", json=depth).status_code == 200
            assert complete(other).choices[0].text == expected.text
            assert counter(speculating, "vllm:spec_decode_num_accepted_tokens_total") == accepted
            refused = speculating.admin.patch("/admin/v1/config", json={"num_speculative_tokens": 4}).json()
            assert (refused["max"], refused["nearest"]) == (3, 3)
            # Drafts truncated by the end of a text lower the mean below the 4 of every other step.
            line = re.compile(r"SpecDecoding metrics: Mean acceptance length: (3\.[5-9]|4\.0).* rate: 100\.0%")
            speculating.wait_for(lambda: bool(line.search(speculating.log.read_text())), "the line")
    finally:
        speculating.end()


def test_sigterm_finishes_running_requests_and_exits_0(engine: "RealEngine", client: openai.OpenAI) -> None:
    """The last test: it stops the engine."""
    stream = complete(client, max_tokens=200, stream=True)
    next(stream)
    engine.process.terminate()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert engine.process.wait(DEADLINE_SECONDS) == 0
    assert "Traceback" not in engine.log.read_text()


def counter(engine: "RealEngine", name: str) -> float:
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", engine.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found.group(1))
