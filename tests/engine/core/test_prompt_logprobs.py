"""Log-probabilities of a prompt's own tokens are the same however the prompt is computed."""

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import msgspec
import pytest
from engine_builders import a_new_request as a_request
from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.requests import AddRequest, SequenceOutput
from trimtab_engine.scheduling.sampling import PackedLogprobs, TokenLogprobs

VOCABULARY = 97
BLOCKS_FOR_ONE = 128 // 8


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    return model_of()


an_engine = partial(
    engine_builders.an_engine, max_model_len=128, num_gpu_blocks_override=4 * BLOCKS_FOR_ONE, max_num_batched_tokens=256
)


def a_prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCABULARY - 1) for i in range(length)]


def serve(engine: Engine, requests: list[AddRequest]) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def judged(outputs: list[SequenceOutput]) -> list[TokenLogprobs]:
    assert outputs[0].prompt_logprobs is not None
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    return list(outputs[0].prompt_logprobs)


PROMPTS = [a_prompt(seed, length) for seed, length in enumerate((2, 40, 33, 61, 90, 17, 50, 77))]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[TokenLogprobs]]:
    """Return the values of each prompt computed alone and unchunked."""
    engine = an_engine(model)
    requests = [a_request(f"r{i}", prompt, max_tokens=3, prompt_logprobs=2) for i, prompt in enumerate(PROMPTS)]
    return [judged(serve(engine, [request])[request.request_id]) for request in requests]


def test_prompt_logprobs_equal_logprobs_of_shorter_prompts(model: Path, expected: list[list[TokenLogprobs]]) -> None:
    engine, prompt = an_engine(model), PROMPTS[1]
    for position in (1, 2, 17, 39):
        request = a_request("a", prompt[:position], max_tokens=1, logprobs=VOCABULARY)
        (after,) = serve(engine, [request])["a"][0].logprobs or []
        known = dict(zip(after.token_ids, after.logprobs, strict=True))
        entry = expected[1][position - 1]
        assert entry.token_ids[0] == prompt[position]
        assert entry.logprobs[0] == pytest.approx(known[prompt[position]], abs=1e-4)
        assert entry.rank == 1 + sum(value > known[prompt[position]] + 1e-6 for value in known.values())
        assert entry.token_ids[1:] == after.token_ids[1:3]


def test_prompt_logprobs_cover_all_tokens_but_first(expected: list[list[TokenLogprobs]]) -> None:
    assert [len(entries) for entries in expected] == [len(prompt) - 1 for prompt in PROMPTS]
    for prompt, entries in zip(PROMPTS, expected, strict=True):
        assert [entry.token_ids[0] for entry in entries] == prompt[1:]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 9, "long_prefill_token_threshold": 5},
        {"num_gpu_blocks_override": BLOCKS_FOR_ONE + 3, "max_num_batched_tokens": 24},  # preempts
    ],
)
def test_however_the_prompts_are_batched(
    model: Path, expected: list[list[TokenLogprobs]], changes: dict[str, Any], overlap: bool
) -> None:
    engine = an_engine(model, async_scheduling=overlap, **{"max_num_seqs": 8} | changes)
    requests = [a_request(f"r{i}", prompt, max_tokens=30, prompt_logprobs=2) for i, prompt in enumerate(PROMPTS)]
    requests.append(a_request("plain", a_prompt(99, 40), max_tokens=30))
    outputs = serve(engine, requests)
    for number, entries in enumerate(expected):
        found = judged(outputs[f"r{number}"])
        assert [entry.token_ids[0] for entry in found] == [entry.token_ids[0] for entry in entries]
        for one, other in zip(found, entries, strict=True):
            assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-4)
    assert outputs["plain"][0].prompt_logprobs is None


def test_nothing_is_taken_from_the_prefix_cache(model: Path, expected: list[list[TokenLogprobs]]) -> None:
    engine, prompt = an_engine(model), PROMPTS[4]
    serve(engine, [a_request("first", prompt, max_tokens=1)])
    again = serve(engine, [a_request("again", prompt, max_tokens=1)])["again"]
    assert again[0].num_cached_tokens > 0
    asked = serve(engine, [a_request("asked", prompt, max_tokens=1, prompt_logprobs=2)])["asked"]
    assert asked[0].num_cached_tokens == 0
    assert len(judged(asked)) == len(prompt) - 1


POSITIONS = st.lists(
    st.builds(
        TokenLogprobs,
        token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=2),
        logprobs=st.lists(st.floats(-100, 0, width=32), min_size=2, max_size=2) | st.just([]),
        rank=st.integers(1, 2**31 - 1),
    )
)


@given(POSITIONS, POSITIONS)
def test_packed_logprobs_read_like_a_list(first: list[TokenLogprobs], second: list[TokenLogprobs]) -> None:
    packed = PackedLogprobs.of(first)
    packed.extend(PackedLogprobs.of(second))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedLogprobs)
    assert list(sent) == first + second
    assert len(sent) == len(first) + len(second)
    assert sent.num_values == 2 * len(sent)


def test_packed_logprobs_take_a_few_bytes_per_value() -> None:
    packed = PackedLogprobs.of(TokenLogprobs([n] * 21, [-1.5] * 21, 3) for n in range(4761))
    assert len(msgspec.msgpack.encode(packed)) < 9 * packed.num_values
    assert sum(map(sys.getsizeof, (packed.counts, packed.ranks, packed.token_ids, packed.logprobs))) < 1 << 20


def test_reported_prompt_logprobs_are_not_kept(model: Path) -> None:
    """Nor computed again after a preemption, which may then use cached blocks."""
    engine = an_engine(model)
    engine.add(a_request("r", PROMPTS[4], max_tokens=20, prompt_logprobs=2))
    outputs = engine.step().outputs
    (request,) = engine._scheduler.unfinished()
    assert len(outputs[0].prompt_logprobs or ()) == len(PROMPTS[4]) - 1
    assert len(request.prompt_logprobs) == 0
    engine.reset_prefix_cache(reset_running_requests=True)
    while engine.has_work:
        outputs += engine.step().outputs
    assert len(request.prompt_logprobs) == 0
    assert [output.prompt_logprobs for output in outputs[1:]] == [None] * 19
