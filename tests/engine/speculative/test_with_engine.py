"""The engine with speculation: same answers as without it, under any scheduling."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from draft_heads import save_eagle
from engine_benchmarks.parity import load_runner
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError
from trimtab_engine.messages.admin import PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest, SequenceOutput, SpeculationCounts
from trimtab_engine.sampling.sampler import target_probabilities
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

VOCABULARY, MAX_MODEL_LEN = 97, 128
BLOCKS_FOR_ONE = MAX_MODEL_LEN // 8
DEPTH = 4
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=DEPTH, prompt_lookup_min=1, prompt_lookup_max=3)


def drafts_of(model: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(model), num_speculative_tokens=DEPTH)


def an_engine(model: Path, speculative: SpeculativeConfig | None = None, **changes: Any) -> Engine:
    depth = 0 if speculative is None else speculative.num_speculative_tokens
    settings: dict[str, Any] = {
        "load_format": "auto",
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": 8 * BLOCKS_FOR_ONE,
        "max_num_batched_tokens_cap": 256,
        "speculative": speculative,
        "num_speculative_tokens": depth,
        "num_speculative_tokens_cap": depth,
    }
    return engine_builders.an_engine(model, **settings | changes)


def a_request(number: int, *, prompt: int = 20, output: int = 40, **sampling: Any) -> AddRequest:
    """Its prompt repeats itself, so that n-grams find something."""
    dice = random.Random(number)
    tokens = [dice.randrange(VOCABULARY - 1) for _ in range(prompt)]
    tokens[prompt // 2 :] = tokens[: prompt - prompt // 2]
    return engine_builders.a_new_request(f"r{number}", tokens, **{"max_tokens": output, **sampling})


class Served:
    """Result of a run: tokens, outputs and finish reasons by request, and draft counts."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.reasons: dict[str, str | None] = {}
        self.counts = SpeculationCounts()
        self.num_preemptions = 0
        self.num_steps = 0


def serve(engine: Engine, requests: list[AddRequest], between_steps: Any = lambda step: None) -> Served:
    served = Served()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        step = engine.step()
        stats = step.stats
        served.num_steps += 1
        served.counts.add(stats.num_drafts, stats.num_draft_tokens, stats.accepted_per_position)
        served.num_preemptions += sum(sum(by_reason.values()) for by_reason in stats.preempted.values())
        for output in step.outputs:
            served.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            served.outputs.setdefault(output.request_id, []).append(output)
            served.reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
        between_steps(served.num_steps)
    return served


REQUESTS = [a_request(n, prompt=4 + 6 * (n % 6), output=30 + 7 * (n % 5)) for n in range(12)]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """The answers without speculation, one request at a time."""
    engine = an_engine(model, enable_prefix_caching=False)
    return {request.request_id: serve(engine, [request]).tokens[request.request_id] for request in REQUESTS}


@pytest.fixture(params=["ngram", "itself", "perturbed", "truncated"])
def speculative(request: pytest.FixtureRequest, model: Path, perturbed: Path, truncated: Path) -> SpeculativeConfig:
    paths = {"itself": model, "perturbed": perturbed, "truncated": truncated}
    return NGRAM if request.param == "ngram" else drafts_of(paths[request.param])


# --- greedy -------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_without_speculation(
    model: Path, expected: dict[str, list[int]], speculative: SpeculativeConfig
) -> None:
    served = serve(an_engine(model, speculative), REQUESTS)
    assert served.tokens == expected
    assert set(served.reasons.values()) == {"length"}
    assert served.counts.num_drafts > 0


def test_acceptance_depends_on_the_draft(model: Path, perturbed: Path, truncated: Path) -> None:
    def accepted(draft: Path) -> float:
        counts = serve(an_engine(model, drafts_of(draft)), REQUESTS).counts
        return counts.num_accepted_tokens / counts.num_draft_tokens

    assert accepted(model) == 1.0
    assert 0.1 < accepted(perturbed) < 0.95
    assert accepted(truncated) < 0.1


def test_accepted_drafts_save_steps(model: Path) -> None:
    request = a_request(1, output=50)
    without, with_drafts = (serve(an_engine(model, s), [request]).num_steps for s in (None, drafts_of(model)))
    assert without == 50
    assert with_drafts == 1 + -(-49 // (DEPTH + 1))


def test_answers_survive_preemption_and_chunked_prefill(
    model: Path, expected: dict[str, list[int]], speculative: SpeculativeConfig
) -> None:
    engine = an_engine(model, speculative, num_gpu_blocks_override=BLOCKS_FOR_ONE, max_num_batched_tokens=16)
    served = serve(engine, REQUESTS)
    assert served.tokens == expected
    assert served.num_preemptions > 3


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_answers_survive_swapping(model: Path, perturbed: Path, expected: dict[str, list[int]], mode: str) -> None:
    engine = an_engine(
        model,
        drafts_of(perturbed),
        num_gpu_blocks_override=BLOCKS_FOR_ONE,
        preemption_mode=mode,
        swap_space_bytes=64 << 20,
        swap_space_bytes_cap=64 << 20,
    )
    served = serve(engine, REQUESTS)
    assert served.tokens == expected
    assert served.num_preemptions > 3


def test_requests_share_prefixes_and_drafts_stay_as_good(model: Path) -> None:
    engine = an_engine(model, drafts_of(model))
    request = a_request(3, prompt=40, output=30)
    first = serve(engine, [request])
    again = serve(engine, [AddRequest("again", request.prompt_token_ids, request.sampling, arrival_time=0.0)])
    assert again.tokens["again"] == first.tokens["r3"]
    assert again.outputs["again"][0].num_cached_tokens >= 32
    assert again.counts.num_accepted_tokens == again.counts.num_draft_tokens, (
        "the draft's part of a block is shared too"
    )


def test_aborts_at_any_time_leave_the_others_alone(
    model: Path, expected: dict[str, list[int]], speculative: SpeculativeConfig
) -> None:
    engine = an_engine(model, speculative)
    victims = [request.request_id for request in REQUESTS[::3]]

    def abort(step: int) -> None:
        if step % 3 == 0 and victims:
            engine.abort([victims.pop()])

    gone = set(victims)
    served = serve(engine, REQUESTS, abort)
    assert {r: t for r, t in served.tokens.items() if r not in gone} == {
        r: t for r, t in expected.items() if r not in gone
    }


# --- where an answer ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", range(1, 9))
def test_max_tokens_is_exact(model: Path, output: int) -> None:
    served = serve(an_engine(model, drafts_of(model)), [a_request(1, output=output)])
    assert len(served.tokens["r1"]) == output
    assert served.reasons["r1"] == "length"


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_among_accepted_drafts_ends_the_answer(
    model: Path, expected: dict[str, list[int]], place: int
) -> None:
    whole = expected["r4"]
    stop = whole[place]
    request = REQUESTS[4]
    first = whole.index(stop)
    params = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,), logprobs=0)
    served = serve(
        an_engine(model, drafts_of(model)), [AddRequest("r4", request.prompt_token_ids, params, arrival_time=0.0)]
    )
    assert served.tokens["r4"] == whole[: first + 1]
    last = served.outputs["r4"][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", stop)
    assert all(len(o.logprobs or []) == len(o.token_ids) for o in served.outputs["r4"])


def test_several_tokens_of_a_step_each_have_their_own_logprobs(model: Path) -> None:
    request = a_request(2, output=20, logprobs=3)
    plain, speculated = (serve(an_engine(model, s), [request]).outputs["r2"] for s in (None, drafts_of(model)))
    assert max(len(output.token_ids) for output in speculated) == DEPTH + 1
    pairs = zip(
        [entry for output in plain for entry in output.logprobs or []],
        [entry for output in speculated for entry in output.logprobs or []],
        strict=True,
    )
    for one, other in pairs:
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.rank == other.rank


# --- random choice ------------------------------------------------------------------------------------------------


def test_seeded_answers_are_those_without_speculation(model: Path, speculative: SpeculativeConfig) -> None:
    requests = [a_request(n, seed=n, temperature=0.8, top_p=0.9, frequency_penalty=0.3 * (n % 2)) for n in range(8)]
    plain = serve(an_engine(model), requests).tokens
    tight = an_engine(model, speculative, num_gpu_blocks_override=BLOCKS_FOR_ONE)
    assert serve(tight, requests).tokens == plain


def reference_distribution(model: Path, prompt: list[int], params: Sampling) -> dict[tuple[int, ...], float]:
    """Return the joint distribution of the second and third token by enumeration, from single rows."""
    runner = load_runner(str(model), block_size=8, num_blocks=8)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, p in joint.items():
            request = Request.of("r", prompt, params, arrival_time=0.0)
            request.token_ids += tokens
            request.block_tables[0] = list(range(8))
            logits = runner.execute([ScheduledSequence(request, 0, request.num_tokens, samples=True)])
            for token, q in enumerate(target_probabilities(logits.clone(), [request])[0].tolist()):
                if q > 0:
                    longer[*tokens, token] = p * q
        joint = longer
    return joint


RANDOM: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 6},
    "top-p": {"temperature": 1.5, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "top_k": 5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize(
    ("method", "sampling"), [*itertools.product(["ngram", "perturbed"], RANDOM), ("eagle", "penalties")]
)
def test_random_answers_follow_the_models_distribution(
    model: Path, perturbed: Path, tmp_path: Path, method: str, sampling: str
) -> None:
    """Pearson's chi-square test on three tokens in a row, of which the last two are verified drafts."""
    torch.manual_seed(7)
    prompt = [5, 17, 3, 5, 17, 3, 5]
    height = 80.0 if method == "eagle" else 6.0  # so that what n-grams, or a random head, propose is drawn at times
    bias = {5: height, 17: height, 3: height}
    params = Sampling(max_tokens=5, ignore_eos=True, logit_bias=bias, **RANDOM[sampling])
    expected = reference_distribution(model, prompt, params)
    drafts = {
        "ngram": lambda: NGRAM,
        "perturbed": lambda: drafts_of(perturbed),
        "eagle": lambda: SpeculativeConfig(
            method="eagle", model=str(save_eagle(tmp_path, model)), num_speculative_tokens=DEPTH
        ),
    }
    engine = an_engine(
        model,
        drafts[method](),
        max_num_seqs=64,
        max_num_seqs_cap=64,
        max_num_batched_tokens=1024,
        max_num_batched_tokens_cap=1024,
    )
    total = 2048
    served = serve(engine, [AddRequest(str(n), prompt, params, arrival_time=0.0) for n in range(total)])
    counts = Counter(tuple(tokens[:3]) for tokens in served.tokens.values())
    assert set(counts) <= expected.keys(), "an impossible answer"
    assert served.counts.num_accepted_tokens > 200
    likely = [(counts[tokens], p * total) for tokens, p in expected.items() if p * total >= 5]
    rest = total - sum(seen for seen, _ in likely), total - sum(wanted for _, wanted in likely)
    cells = [*likely, rest] if rest[1] >= 5 else likely
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert len(cells) > 5
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)) > 0.001


# --- start and steering -------------------------------------------------------------------------------------------


def test_a_draft_models_bytes_are_accounted_for(model: Path, truncated: Path) -> None:
    plain, speculating = an_engine(model).ledger(), an_engine(model, drafts_of(truncated)).ledger()
    of_a_layer = 2 * 8 * 2 * 16 * 4  # keys and values of 8 tokens, 2 heads of 16 float32
    assert speculating.bytes_per_block == plain.bytes_per_block + of_a_layer
    assert speculating.kinds["kv_mapped"] == 8 * BLOCKS_FOR_ONE * speculating.bytes_per_block
    assert speculating.kinds["workspace"] >= 8 * DEPTH * VOCABULARY * 4


def test_a_draft_model_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    )
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has 50 tokens, the model .* 97; their vocabularies must be one"):
        an_engine(model, drafts_of(tmp_path))


def test_the_depth_is_live_and_a_draft_model_catches_up_after_0(model: Path, expected: dict[str, list[int]]) -> None:
    engine = an_engine(model, drafts_of(model))
    depths = iter([4, 0, 0, 2, 4, 0, 1] * 100)

    def turn(step: int) -> None:
        if step % 5 == 0:
            status, body = engine.patch_config(PatchConfig({"num_speculative_tokens": next(depths)}))
            assert status == 200, body

    served = serve(engine, REQUESTS, turn)
    assert served.tokens == expected
    assert served.counts.num_accepted_tokens == served.counts.num_draft_tokens > 50
    assert len(served.counts.accepted_per_position) == DEPTH
    status, refusal = engine.patch_config(PatchConfig({"num_speculative_tokens": DEPTH + 1}))
    assert (status, refusal["max"], refusal["nearest"]) == (422, DEPTH, DEPTH)


def test_a_draft_model_sleeps_and_wakes_up_with_the_target(model: Path, expected: dict[str, list[int]]) -> None:
    engine = an_engine(model, drafts_of(model))

    def nap(step: int) -> None:
        if step == 4:
            assert engine.lifecycle(Sleep(2, "keep"))[0] == 200
            assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200

    served = serve(engine, REQUESTS[:4], nap)
    assert served.tokens == {request.request_id: expected[request.request_id] for request in REQUESTS[:4]}
    assert served.num_preemptions > 0
    assert served.counts.num_accepted_tokens == served.counts.num_draft_tokens
