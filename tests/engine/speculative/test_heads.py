"""Draft heads: drafts equal those of transformers' own layers under any scheduling, and answers equal those without
speculation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from draft_heads import Drafts, eagle_drafts, mtp_drafts, save_deepseek_with_mtp, save_eagle
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ConfigError, ModelError, NotSupportedError
from trimtab_engine.messages.admin import PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.step_inputs import StepInputs
from trimtab_engine.speculative.head_proposer import HeadProposer

VOCABULARY, MAX_MODEL_LEN, DEPTH = 97, 128, 3
BLOCKS_FOR_ONE = MAX_MODEL_LEN // 8
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "max_position_embeddings": 256, "eos_token_id": 96, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
Kind = tuple[Path, SpeculativeConfig, Drafts]


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def kind(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """(model, configuration, the head's drafts by transformers' layers)."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        save_eagle(folder, model)
        config = SpeculativeConfig(method="eagle", model=str(folder), num_speculative_tokens=DEPTH)
        return model, config, eagle_drafts(folder, model)
    save_deepseek_with_mtp(folder, DEEPSEEK)
    return folder, SpeculativeConfig(method="mtp", num_speculative_tokens=DEPTH), mtp_drafts(folder, DEEPSEEK)


@pytest.fixture(scope="module")
def expected(kind: Kind) -> dict[str, list[int]]:
    """The answers without drafts."""
    return serve(an_engine(kind[0]), REQUESTS)


def an_engine(model: Path, speculative: SpeculativeConfig | None = None, **changes: Any) -> Engine:
    depth = 0 if speculative is None else speculative.num_speculative_tokens
    settings: dict[str, Any] = {
        "load_format": "auto",
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": 8 * BLOCKS_FOR_ONE,
        "speculative": speculative,
        "num_speculative_tokens": depth,
        "num_speculative_tokens_cap": depth,
    }
    return engine_builders.an_engine(model, **settings | changes)


def a_request(number: int, *, prompt: int, output: int, **sampling: Any) -> AddRequest:
    tokens = torch.randint(0, VOCABULARY - 1, (prompt,), generator=torch.Generator().manual_seed(number)).tolist()
    return engine_builders.a_new_request(f"r{number}", tokens, max_tokens=output, **sampling)


GREEDY = [a_request(n, prompt=3 + 9 * n, output=26 - 3 * n) for n in range(4)]
SEEDED = a_request(4, prompt=12, output=22, seed=5, temperature=0.8, top_p=0.9, frequency_penalty=0.3)
REQUESTS = [*GREEDY, SEEDED]


def serve(
    engine: Engine, requests: list[AddRequest], between_steps: Callable[[int], None] = lambda step: None
) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    step = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        step += 1
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
        between_steps(step)
    return tokens


class Proposed:
    """Return every draft of a greedy request, with the preceding tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        learn = HeadProposer.learn

        def note(proposer: HeadProposer, batch: Batch, inputs: StepInputs, new: dict[Any, list[int]]) -> None:
            self.seen += [
                (list(s.request.token_ids), list(s.draft_token_ids))
                for s in batch.sequences
                if s.request.sampling.temperature == 0
            ]
            learn(proposer, batch, inputs, new)

        patch.setattr(HeadProposer, "learn", note)

    def check(self, drafts: Drafts, *, least: int) -> None:
        """All drafts equal those of transformers' layers."""
        made = [(tokens, own) for tokens, own in self.seen if own]
        assert len(made) >= least
        for tokens, own in made[::3]:  # any will do, and each takes whole forwards
            assert own == drafts(tokens, len(own)), f"behind {len(tokens)} tokens"


def test_head_drafts_equal_transformers_and_keep_answers(
    kind: Kind, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, speculative, drafts = kind
    proposed = Proposed(monkeypatch)
    assert serve(an_engine(model, speculative), REQUESTS) == expected
    proposed.check(drafts, least=60)


def test_so_they_are_through_chunks_and_preemption(
    kind: Kind, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, speculative, drafts = kind
    proposed = Proposed(monkeypatch)
    engine = an_engine(
        model,
        speculative,
        num_gpu_blocks_override=BLOCKS_FOR_ONE,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,  # a block's last token was computed with another request's next token
        preemption_mode="auto",
        swap_space_bytes=1 << 20,
        swap_space_bytes_cap=1 << 20,
    )
    preempted = 0

    def count(step: int) -> None:
        nonlocal preempted
        preempted = max(preempted, sum(r.num_preemptions for r in engine._scheduler.running_requests()))

    assert serve(engine, REQUESTS, count) == expected
    assert preempted
    proposed.check(drafts, least=60)


def test_the_depth_is_live_and_whoever_ran_at_0_gets_no_more_drafts(
    kind: Kind, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, speculative, drafts = kind
    proposed = Proposed(monkeypatch)
    engine = an_engine(model, speculative)

    def turn(step: int) -> None:
        depth = {4: 0, 7: 2}.get(step)
        if depth is not None:
            assert engine.patch_config(PatchConfig({"num_speculative_tokens": depth}))[0] == 200
        if step == 7:
            proposed.seen.clear()
            late = a_request(9, prompt=11, output=20)
            engine.add(late)

    served = serve(engine, REQUESTS, turn)
    assert {name: tokens for name, tokens in served.items() if name in expected} == expected
    late = a_request(9, prompt=11, output=20).prompt_token_ids
    made = [tokens for tokens, own in proposed.seen if own]
    assert made
    assert all(tokens[: len(late)] == late for tokens in made)
    proposed.check(drafts, least=5)


def test_a_head_sleeps_and_wakes_up_with_its_model(kind: Kind, expected: dict[str, list[int]]) -> None:
    engine = an_engine(*kind[:2])

    def nap(step: int) -> None:
        if step == 4:
            assert engine.lifecycle(Sleep(2, "keep"))[0] == 200
            assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200

    assert serve(engine, REQUESTS, nap) == expected


def test_its_bytes_are_accounted_for(kind: Kind) -> None:
    model, speculative, _ = kind
    plain, speculating = an_engine(model).ledger(), an_engine(model, speculative).ledger()
    # Elements per token: keys and values of two layers with 2 heads of 16, or one latent vector.
    kept = 2 * 2 * 2 * 16 if speculative.method == "eagle" else 16 + 8
    assert speculating.bytes_per_block == plain.bytes_per_block + 8 * kept * 4
    assert speculating.kinds["workspace"] >= 8 * DEPTH * VOCABULARY * 4


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_head_without_bias_in_its_join_is_read_as_well(model: Path, tmp_path: Path) -> None:
    head = save_eagle(tmp_path, model, num_layers=1, has_bias=False)
    an_engine(model, SpeculativeConfig(method="eagle", model=str(head), num_speculative_tokens=2))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 50}, ConfigError, "the head's vocab_size is 50, the model's 97; it is another's head"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, NotSupportedError, "head of LlamaForCausalLMEagle3 is not"),
    ],
)
def test_another_models_head_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    head = save_eagle(tmp_path, model, **changes)
    with pytest.raises(error, match=message):
        an_engine(model, SpeculativeConfig(method="eagle", model=str(head), num_speculative_tokens=2))


def test_a_model_without_such_layers_has_no_mtp(model: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"layers of LlamaForCausalLM that predict further tokens are not"):
        an_engine(model, SpeculativeConfig(method="mtp", num_speculative_tokens=1))


def test_a_checkpoint_that_was_stripped_of_its_layer_is_refused(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    plain: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    plain.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the weights lack \d+ tensors, first model\.layers\.2\."):
        an_engine(tmp_path, SpeculativeConfig(method="mtp", num_speculative_tokens=1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2 is not supported"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not supported"),
        ({"device": "cuda"}, "is not supported on CUDA"),
    ],
)
def test_head_without_hidden_states_is_rejected(changes: dict[str, Any], said: str) -> None:
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    with pytest.raises(NotSupportedError, match=said):
        engine_builders.a_config(Path("model"), speculative=speculative, num_speculative_tokens_cap=1, **changes)
