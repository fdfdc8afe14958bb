"""Pooling requests: hidden states equal transformers' for any scheduling, and generating requests are unaffected."""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import numpy as np
import pytest
import torch
from engine_builders import a_new_request
from transformers import AutoConfig, AutoModelForCausalLM
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core import engine as engine_module
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest, SequenceOutput, StepStats
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import Sampling

VOCABULARY = 97
BLOCKS_FOR_ONE = 128 // 8
CACHE = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "models"
MODEL = CACHE / "SmolLM2-135M-Instruct"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},  # by transformers' own code
}
TIGHT = {
    "num_gpu_blocks_override": BLOCKS_FOR_ONE + 3,
    "max_num_batched_tokens": 24,
    "long_prefill_token_threshold": 5,
}
"""Blocks for little more than one request, and prompts that are computed over many steps: decodes take their blocks."""
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
LAST, MEAN = Pooling("last", normalize=False), Pooling("mean", normalize=False)

an_engine = partial(
    engine_builders.an_engine, max_model_len=128, num_gpu_blocks_override=4 * BLOCKS_FOR_ONE, max_num_batched_tokens=256
)


def a_checkpoint(folder: Path, kind: str) -> Any:
    """A random model, its norms random too, saved as safetensors."""
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model: Any = make(AutoConfig.for_model(kind, **SIZES | KINDS[kind])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or "ln_" in name
            parameter.normal_(1.0 if is_norm and kind != "gemma3_text" else 0.0, 0.1 if is_norm else 0.2)
    model.save_pretrained(folder)
    return model


def a_prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCABULARY - 1) for i in range(length)]


PROMPTS = [a_prompt(seed, length) for seed, length in enumerate((1, 2, 40, 33, 61, 90, 17, 128))]


def hidden_of(model: Any, prompts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """Return hidden states [tokens, hidden_size] after the final norm, of each prompt alone."""
    with torch.no_grad():
        return [model.base_model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]


def to_pool(request_id: str, prompt: list[int], pooling: Pooling, priority: int = 0) -> AddRequest:
    return AddRequest(request_id, prompt, Sampling(), arrival_time=0.0, priority=priority, pooling=pooling)


def serve(
    engine: Engine, requests: list[AddRequest], steps: list[StepStats] | None = None
) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        step = engine.step()
        if steps is not None:
            steps.append(step.stats)
        for output in step.outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def vector_of(outputs: list[SequenceOutput]) -> np.ndarray[Any, Any]:
    """There is one output, which ends the request."""
    (output,) = outputs
    assert (output.token_ids, output.finish_reason, output.error) == ([], "stop", "")
    assert output.first_scheduled_time is not None
    assert output.pooled is not None
    return np.frombuffer(output.pooled, "<f4")


def assert_close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Relative to the vector's length, within 1e-4: orders of summation differ."""
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray[Any, Any]]]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, hidden_of(a_checkpoint(folder, "llama"), PROMPTS)


def check(engine: Engine, hidden: list[np.ndarray[Any, Any]]) -> tuple[list[StepStats], int]:
    """Pool all prompts both ways with concurrent generation and compare with each alone. Return the steps and the
    number of preempted pooling requests.
    """
    numbered = list(enumerate(PROMPTS))
    requests = [a_new_request(f"tokens-{number}", prompt[:20], max_tokens=50) for number, prompt in numbered]
    requests[3:3] = [to_pool(f"mean-{number}", prompt, MEAN) for number, prompt in numbered]
    requests[5:5] = [to_pool(f"last-{number}", prompt, LAST) for number, prompt in numbered]
    steps: list[StepStats] = []
    outputs = serve(engine, requests, steps)
    for number, states in enumerate(hidden):
        assert_close(vector_of(outputs[f"last-{number}"]), states[-1])
        assert_close(vector_of(outputs[f"mean-{number}"]), states.mean(axis=0))
        assert sum(len(output.token_ids) for output in outputs[f"tokens-{number}"]) == 50
    pooled = [of[0] for of in outputs.values() if of[0].pooled is not None]
    return steps, sum(output.num_preemptions for output in pooled)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_hidden_states_of_transformers(kind: str, tmp_path: Path) -> None:
    hidden = hidden_of(a_checkpoint(tmp_path, kind), PROMPTS)
    engine = an_engine(tmp_path, load_format="auto")
    for number, states in enumerate(hidden):
        alone = serve(engine, [to_pool(f"last-{number}", PROMPTS[number], LAST)])
        assert_close(vector_of(alone[f"last-{number}"]), states[-1])
    check(engine, hidden)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 16},
        TIGHT,
        TIGHT | SWAP,
    ],
    ids=["chunked", "preempted", "swapped"],
)
def test_however_the_prompts_are_computed(
    llama: tuple[Path, list[np.ndarray[Any, Any]]], changes: dict[str, Any], overlap: bool
) -> None:
    engine = an_engine(llama[0], load_format="auto", async_scheduling=overlap, **changes)
    steps, num_preemptions = check(engine, llama[1])
    modes = {mode for stats in steps for mode in stats.preempted}
    assert modes == ({changes.get("preemption_mode", "recompute")} if "num_gpu_blocks_override" in changes else set())
    assert bool(num_preemptions) == bool(modes)
    assert sum(stats.num_prompt_tokens for stats in steps) == sum(2 * len(p) + len(p[:20]) for p in PROMPTS)
    assert sum(stats.num_generation_tokens for stats in steps) == 50 * len(PROMPTS)


@pytest.mark.parametrize("speculative", ["ngram", "draft_model"])
def test_pooling_with_drafting_requests(llama: tuple[Path, list[np.ndarray[Any, Any]]], speculative: Any) -> None:
    model = str(llama[0]) if speculative == "draft_model" else None
    config = SpeculativeConfig(method=speculative, num_speculative_tokens=3, model=model, prompt_lookup_min=1)
    depth = {"num_speculative_tokens": 3, "num_speculative_tokens_cap": 3}
    engine = an_engine(llama[0], load_format="auto", max_num_batched_tokens=40, speculative=config, **depth)
    steps, _ = check(engine, llama[1])
    assert sum(stats.num_drafts for stats in steps) > 0


def test_last_pooling_uses_prefix_cache_and_mean_does_not(
    llama: tuple[Path, list[np.ndarray[Any, Any]]],
) -> None:
    folder, hidden = llama
    engine, prompt = an_engine(folder, load_format="auto"), PROMPTS[5]
    serve(engine, [a_new_request("first", prompt, max_tokens=1)])
    last = serve(engine, [to_pool("last", prompt, LAST)])["last"]
    mean = serve(engine, [to_pool("mean", prompt, MEAN)])["mean"]
    assert_close(vector_of(last), hidden[5][-1])
    assert_close(vector_of(mean), hidden[5].mean(axis=0))
    assert last[0].num_cached_tokens == 88
    assert mean[0].num_cached_tokens == 0
    tokens = serve(engine, [a_new_request("again", prompt, max_tokens=1)])["again"]
    assert tokens[0].num_cached_tokens == 88, "pooling requests are preempted"


def test_vectors_are_cut_and_then_normalised(llama: tuple[Path, list[np.ndarray[Any, Any]]]) -> None:
    folder, hidden = llama
    engine, state = an_engine(folder, load_format="auto"), hidden[2][-1]
    requests = [
        to_pool("whole", PROMPTS[2], Pooling()),
        to_pool("cut", PROMPTS[2], Pooling(dimensions=10)),
        to_pool("as it is", PROMPTS[2], Pooling(dimensions=10, normalize=False)),
    ]
    outputs = serve(engine, requests)
    assert_close(vector_of(outputs["whole"]), state / np.linalg.norm(state))
    assert_close(vector_of(outputs["cut"]), state[:10] / np.linalg.norm(state[:10]))
    assert_close(vector_of(outputs["as it is"]), state[:10])


def test_a_prompt_may_be_as_long_as_the_model_allows_and_no_longer(
    llama: tuple[Path, list[np.ndarray[Any, Any]]],
) -> None:
    engine = an_engine(llama[0], load_format="auto")
    outputs = serve(engine, [to_pool("whole", PROMPTS[7], LAST), to_pool("longer", [*PROMPTS[7], 1], LAST)])
    assert_close(vector_of(outputs["whole"]), llama[1][7][-1])
    (refused,) = outputs["longer"]
    assert refused.finish_reason == "error"
    assert refused.error == "the prompt has 129 tokens, but max_model_len is 128; shorten the prompt"


@pytest.mark.parametrize(
    ("pooling", "wrong"),
    [(Pooling(dimensions=65), "dimensions is 65; the model has 64"), (Pooling(dimensions=0), "dimensions is 0")],
)
def test_invalid_dimensions_fail_only_their_request(
    llama: tuple[Path, list[np.ndarray[Any, Any]]], pooling: Pooling, wrong: str
) -> None:
    engine = an_engine(llama[0], load_format="auto")
    outputs = serve(engine, [to_pool("wrong", PROMPTS[2], pooling), to_pool("right", PROMPTS[2], LAST)])
    assert outputs["wrong"][0].error.startswith(wrong)
    assert_close(vector_of(outputs["right"]), llama[1][2][-1])


def test_nan_fails_its_request_and_invalidates_blocks(
    llama: tuple[Path, list[np.ndarray[Any, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(llama[0], load_format="auto", max_num_batched_tokens=40)
    is_number = iter([False, True, True, True])
    monkeypatch.setattr(engine_module, "is_finite", lambda row: next(is_number))
    steps: list[StepStats] = []
    outputs = serve(engine, [to_pool("wrong", PROMPTS[4], MEAN), to_pool("right", PROMPTS[2], MEAN)], steps)
    (failed,) = outputs["wrong"]
    assert (failed.finish_reason, failed.is_engines_fault) == ("error", True)
    assert failed.error.startswith("the model's hidden states are not numbers")
    assert failed.pooled is None
    assert_close(vector_of(outputs["right"]), llama[1][2].mean(axis=0))
    assert sum(stats.failed_requests.get("nan", 0) for stats in steps) == 1
    monkeypatch.undo()
    found = serve(engine, [a_new_request("later", PROMPTS[4], max_tokens=1)])["later"]
    assert found[0].num_cached_tokens == 0


def test_pooling_follows_priority(llama: tuple[Path, list[np.ndarray[Any, Any]]]) -> None:
    engine = an_engine(llama[0], load_format="auto", scheduling_policy="priority", max_num_batched_tokens=64)
    requests = [to_pool(str(number), PROMPTS[4], MEAN, priority=-number) for number in range(6)]
    ended: list[str] = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        ended += [output.request_id for output in engine.step().outputs if output.finish_reason]
    assert ended == ["5", "4", "3", "2", "1", "0"]


def test_abort_between_chunks_frees_blocks(
    llama: tuple[Path, list[np.ndarray[Any, Any]]],
) -> None:
    engine = an_engine(llama[0], load_format="auto", max_num_batched_tokens=16)
    engine.add(to_pool("gone", PROMPTS[5], MEAN))
    engine.step()
    engine.abort(["gone"])
    assert not engine.has_work
    engine.check_integrity()
    assert engine.step().stats.kv_blocks_used == 0


def test_the_kv_cache_shrinks_and_grows_under_them(llama: tuple[Path, list[np.ndarray[Any, Any]]]) -> None:
    """Between any two chunks."""
    folder, hidden = llama
    engine = engine_builders.an_engine(
        folder, load_format="auto", max_model_len=128, max_num_batched_tokens=16, num_gpu_blocks_override=None
    )
    least = engine.config()["fields"]["gpu_memory_utilization"]["min"]
    requests = [to_pool(f"{n}", prompt, MEAN) for n, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    found: dict[str, list[SequenceOutput]] = {}
    number = 0
    while engine.has_work:
        size = least if number % 2 else round(least + 2e-4, 4)
        assert engine.patch_config(PatchConfig({"gpu_memory_utilization": size}))[0] == 200
        number += 1
        for output in engine.step().outputs:
            found[output.request_id] = [output]
        engine.check_integrity()
    for n, states in enumerate(hidden):
        assert_close(vector_of(found[f"{n}"]), states.mean(axis=0))


def test_pooling_requests_have_no_remaining_tokens(
    llama: tuple[Path, list[np.ndarray[Any, Any]]],
) -> None:
    engine = an_engine(llama[0], load_format="auto", max_num_batched_tokens=16)
    engine.add(to_pool("r", PROMPTS[5], MEAN))
    engine.step()
    assert engine.drain(1.0)["remaining_tokens"] == 0
    assert engine.unfinished() == {"unfinished": []}


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_real_model_gives_the_hidden_states_of_transformers() -> None:
    from transformers import AutoTokenizer

    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}; make model")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["The cat sat on the mat.", "Hi", "Lighthouses are towers with lamps at their tops. " * 12]
    prompts = [tokenizer(text).input_ids for text in texts]
    hidden = hidden_of(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), prompts)
    engine = engine_builders.an_engine(
        MODEL, load_format="auto", cpu_threads=2, max_model_len=512, num_gpu_blocks_override=200, block_size=16
    )
    requests = [
        to_pool(f"{pooling.method}-{number}", prompt, pooling)
        for number, prompt in enumerate(prompts)
        for pooling in (LAST, MEAN)
    ]
    outputs = serve(engine, [*requests, a_new_request("tokens", prompts[0], max_tokens=4)])
    for number, states in enumerate(hidden):
        assert_close(vector_of(outputs[f"last-{number}"]), states[-1])
        assert_close(vector_of(outputs[f"mean-{number}"]), states.mean(axis=0))
