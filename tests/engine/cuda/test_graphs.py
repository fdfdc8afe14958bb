"""CUDA graphs on a GPU: the tokens of eager steps, for every mode and size. Skipped without one."""

import gc
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.sampling.device_sampler import DeviceSampler
from trimtab_engine.scheduling.sampling import Sampling, token_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VOCABULARY = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
Requests = list[tuple[list[int], Sampling]]


@pytest.fixture(autouse=True)
def an_empty_device() -> None:
    """What an engine before left in cycles would be counted with this one's."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


an_engine = partial(
    engine_builders.an_engine,
    device="cuda",
    dtype="float32",
    block_size=16,
    num_gpu_blocks_override=512,
    max_model_len=512,
    max_num_seqs=24,
    max_num_batched_tokens=256,
)


def some_requests(count: int, **sampling: Any) -> Requests:
    dice = random.Random(count)
    return [
        (
            [dice.randrange(1, VOCABULARY) for _ in range(dice.randint(1, 120))],
            Sampling(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}),
        )
        for _ in range(count)
    ]


def generate(engine: Engine, requests: Requests) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many kernels were compiled meanwhile."""
    for number, (prompt, sampling) in enumerate(requests):
        engine.add(AddRequest(str(number), prompt, sampling, arrival_time=0.0))
    tokens: list[list[int]] = [[] for _ in requests]
    compiled = 0
    while engine.has_work:
        step = engine.step()
        compiled += step.stats.kernel_compilations
        for output in step.outputs:
            tokens[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    return tokens, compiled


@pytest.mark.parametrize("mode", [mode for mode in CUDAGraphMode if mode.value not in ("none", "full")])
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 40, "seed": 3}], ids=["greedy", "seeded"])
def test_graphs_give_the_tokens_of_eager_steps(
    model: Path, mode: CUDAGraphMode, overlaps: bool, sampling: dict[str, Any]
) -> None:
    requests = some_requests(40, **sampling)
    eager = an_engine(model, enforce_eager=True, async_scheduling=False)
    expected, _ = generate(eager, requests)
    eager.close()
    engine = an_engine(model, compilation=CompilationConfig(cudagraph_mode=mode), async_scheduling=overlaps)
    assert generate(engine, requests) == (expected, 0), "the same tokens, and nothing compiled while serving"


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.3, "temperature": 0.8, "seed": 5},
        {"logit_bias": {5: 2.0, 6: -3.0}, "logprobs": 3, "repetition_penalty": 1.1},
        {"allowed_tokens": token_mask((3, 5, 7)), "bad_words": ((3, 5), (5, 5), (7, 3, 7))},
        {"min_tokens": 9, "ignore_eos": False, "allowed_tokens": token_mask((0, 4, 8)), "logprobs": 0},
    ],
    ids=["repetition", "presence", "bias", "words", "min tokens"],
)
def test_logit_processing_gives_tokens_of_synchronous_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    requests = some_requests(40, **sampling)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSampler, "can_sample", lambda self, requests: False)
        waiting = an_engine(model)
        expected, _ = generate(waiting, requests)
        waiting.close()
    assert generate(an_engine(model), requests) == (expected, 0)


def test_steps_that_swap_give_the_same_tokens(model: Path) -> None:
    requests = some_requests(24)
    roomy = an_engine(model)
    expected, _ = generate(roomy, requests)
    roomy.close()
    swap = {"preemption_mode": "swap", "swap_space_bytes": 64 << 20, "swap_space_bytes_cap": 64 << 20}
    assert generate(an_engine(model, num_gpu_blocks_override=40, **swap), requests) == (expected, 0)


def test_every_size_gives_the_tokens_of_eager_steps(model: Path) -> None:
    eager, engine = an_engine(model, enforce_eager=True), an_engine(model)
    for count in range(1, 25):
        requests = some_requests(count)
        assert generate(engine, requests)[0] == generate(eager, requests)[0], f"{count} requests"


def test_graph_memory_is_in_the_ledger(model: Path) -> None:
    engine = an_engine(model)
    ledger = engine.ledger()
    assert ledger.kinds["graphs"] > 0
    assert ledger.kinds["workspace"] > 0


def test_resizing_the_kv_cache_leaves_graphs_right(model: Path) -> None:
    requests = some_requests(24)
    expected, _ = generate(an_engine(model, enforce_eager=True), requests)
    engine = an_engine(
        model, num_gpu_blocks_override=None, gpu_memory_utilization="0.6", gpu_memory_utilization_cap="0.8"
    )
    for utilization in (0.8, 0.6, 0.7):
        status, _ = engine.patch_config(PatchConfig({"gpu_memory_utilization": utilization}))
        assert status == 200
        assert generate(engine, requests)[0] == expected


def test_graphs_are_recorded_again_after_the_weights_were_dropped(model: Path) -> None:
    requests = some_requests(24)
    engine = an_engine(model)
    expected, _ = generate(engine, requests)
    used = engine.ledger().driver_used_bytes
    for _ in range(2):
        engine.lifecycle(Sleep(2, "abort"))
        assert engine.ledger().driver_used_bytes < used, "weights, KV cache and graphs are given back"
        engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))
        assert generate(engine, requests)[0] == expected


def test_an_engine_that_is_dropped_gives_its_kv_cache_back(model: Path) -> None:
    engine: Engine | None = an_engine(model, num_gpu_blocks_override=None, gpu_memory_utilization="0.6")
    assert engine is not None
    mapped = engine.ledger().kinds["kv_mapped"]
    used = engine.ledger().driver_used_bytes
    engine.close()
    engine = None
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert used - (total - free) >= mapped


def test_the_ledger_explains_what_the_driver_counts(model: Path) -> None:
    engine = an_engine(model)
    generate(engine, some_requests(40))
    ledger = engine.ledger()
    assert abs(ledger.unattributed_bytes) < 0.01 * ledger.device_bytes
