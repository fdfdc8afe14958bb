"""Steps on CUDA never wait: from inputs to the copy of tokens to the host, no operator reads the device.

Without a GPU, fake CUDA tensors (fakes/fake_device.py) are used: operators run without numbers, kernel launches are
recorded, and every host wait raises.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from calling_recorder import CallingRecorder
from fake_device import CUDA, NoWaiting, Waited, a_fake_device, variants
from fake_nccl import a_fake_nccl, groups_of
from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.config.graphs import CompilationConfig
from trimtab_engine.device.kv_cache import LayerTensors
from trimtab_engine.device.transfer import Mark
from trimtab_engine.models.checkpoint import expected_shapes, expected_tensors
from trimtab_engine.models.family import Model
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import family_of, kv_groups_of, parse_model_config
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.runner.adapters import AdapterSlots
from trimtab_engine.runner.graphs.device_steps import AttentionShape, DeviceSteps, StepLimits
from trimtab_engine.runner.graphs.plan import plan_graphs
from trimtab_engine.sampling.device_sampler import DeviceSampler
from trimtab_engine.sampling.logprobs import ScoresInFlight
from trimtab_engine.sampling.sampler import choose_limited
from trimtab_engine.sampling.token_table import DeviceRow
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling, token_mask
from trimtab_engine.scheduling.step_inputs import flatten
from trimtab_engine.weights.source import Span
from trimtab_kernels.launch import jit
from trimtab_kernels.launch.jit import record_launches
from trimtab_kernels.paged_batch import warm_up_attention
from trimtab_modelspec.quantization import stored_quantization

BLOCK_SIZE, MAX_LEN = 16, 256
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
WINDOW = DENSE | {"architectures": ["MistralForCausalLM"], "sliding_window": 24}
LOCAL_AND_GLOBAL = DENSE | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
SINKS = MIXTURE | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "intermediate_size": 32,
    "sliding_window": 24,
    "attention_bias": True,
}
CHUNKS = {key: value for key, value in MIXTURE.items() if key != "num_experts"} | {
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 24,
    "no_rope_layers": [1, 0],
    "floor_scale": 16,
}
LATENT = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WIDE_MIXTURE = MIXTURE | {"moe_intermediate_size": 128}  # whole fp8 blocks


class FakeSource:
    """Weights of the right shapes, on the device, without values."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        dtype = torch.bfloat16
        if name.endswith("_scale_inv"):
            dtype = torch.float32
        elif name + "_scale_inv" in self._shapes:
            dtype = torch.float8_e4m3fn
        shape = list(self._shapes[name])
        for dimension, span in enumerate((rows, columns)):
            if span is not None:
                shape[dimension] = span[1] - span[0]
        return torch.empty(shape, dtype=dtype, device=CUDA)


SINGLE_RANK = Layout()


@dataclass(frozen=True)
class Ranks:
    """The rank and layout under test, and its graph recorder."""

    layout: Layout = SINGLE_RANK
    rank: int = 0
    recorder: CallingRecorder = field(default_factory=CallingRecorder)


def some_steps(
    config: dict[str, Any],
    folder: Path,
    kv_dtype: torch.dtype = torch.bfloat16,
    ranks: Ranks | None = None,
    adapters: AdapterConfig | None = None,
) -> tuple[DeviceSteps, Model]:
    """Inside a_fake_device()."""
    with NoWaiting(is_start_up=True):
        return _some_steps(config, folder, kv_dtype, ranks or Ranks(), adapters)


def _some_steps(
    config: dict[str, Any], folder: Path, kv_dtype: torch.dtype, ranks: Ranks, adapters: AdapterConfig | None
) -> tuple[DeviceSteps, Model]:
    model_config = parse_model_config(config, {}, str(folder))
    shard, groups = shard_model(model_config, ranks.layout, ranks.rank), groups_of(ranks.layout, ranks.rank)
    shapes, stored = dict(expected_shapes(model_config)), stored_quantization(config, str(folder))
    if stored is not None:
        shapes |= {
            name + "_scale_inv": (-(-shape[0] // 128), -(-shape[1] // 128))
            for name, shape in shapes.items()
            if name.endswith("_proj.weight")
        }
    source: Any = FakeSource(shapes)
    slots = None
    if adapters is not None:
        slots = AdapterSlots(adapters, expected_tensors(model_config), shard, dtype=torch.bfloat16, device=CUDA)
    load = Loader(source, torch.bfloat16, CUDA, lambda count: None, stored, slots)
    model = family_of(model_config.architecture).build(model_config, load, shard, groups)
    if slots is not None:
        slots.open("a model")
    kv_groups = [group.on_rank(shard.layers, ranks.layout.tensor) for group in kv_groups_of(model_config)]
    latent, most = model_config.latent, max(group.num_layers for group in kv_groups)
    sizes = (16, 16) if latent is None else (latent.kept_size, latent.kv_rank)
    block = (64, BLOCK_SIZE, kv_groups[0].each.num_kv_heads, sizes[0])
    keys, values = ([torch.empty(block, dtype=kv_dtype, device=CUDA) for _ in range(most)] for _ in "kv")
    if latent is not None:
        values = keys
    plan = plan_graphs(
        CompilationConfig(cudagraph_capture_sizes=(4, 8, 40)),
        enforce_eager=False,
        optimization_level=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_drafts=2,
        with_adapters=adapters is not None,
    )
    limits = StepLimits(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_num_rows=24,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        attention_windows=tuple(group.attention_window for group in kv_groups),
        with_adapters=adapters is not None,
    )
    sampler = DeviceSampler(304, (2,), max_num_seqs=8, device=CUDA)
    steps = DeviceSteps(
        model,
        LayerTensors(keys, values),
        plan,
        ranks.recorder,
        limits=limits,
        shape=AttentionShape(shard.num_heads, *sizes, 64, torch.bfloat16),
        device=CUDA,
        groups=groups,
        is_first_stage=shard.is_first_stage,
        sampler=sampler,
        adapter_rows=None if slots is None else slots.rows,
    )
    return steps, model


def sequences(*spans: tuple[int, int], num_groups: int = 1) -> list[ScheduledSequence]:
    """(tokens before, tokens now) of each."""
    made = []
    for number, (before, now) in enumerate(spans):
        request = Request.of(str(number), [1] * (before + now), Sampling(), arrival_time=0.0)
        request.block_tables = [list(range(1 + 4 * number, 5 + 4 * number))] * num_groups
        request.num_out_of_window = [0] * num_groups
        made.append(ScheduledSequence(request, before, now, samples=True))
    return made


def run_step(steps: DeviceSteps, model: Model, batch: list[ScheduledSequence], **sampling: Any) -> list[str]:
    """Run two steps as Execution queues them and return the kernels launched in the second, whose newest tokens the
    host does not know.
    """
    num_groups = len(batch[0].request.block_tables)
    inputs, _ = flatten(
        batch, block_size=BLOCK_SIZE, max_decode_tokens=1 << 30, num_groups=num_groups, with_adapters=True
    )
    params = Sampling(**{"temperature": 0.0, **sampling})
    requests = [Request.of("r", [1, 5, 5], params, arrival_time=0.0) for _ in batch]
    for is_fed in (False, True):
        with record_launches() as launches, NoWaiting():
            hidden, wanted = steps.run(inputs, [(0, 0)])
            logits = model.logits(hidden, wanted)
            assert logits is not None
            steps.sample(logits, [DeviceRow(request, row if is_fed else None) for row, request in enumerate(requests)])
    return [launch.kernel.name for launch in launches]


pytestmark = pytest.mark.skipif(not jit.HAS_TRITON, reason="records launches of Triton kernels")
DECODES = ((20, 1), (33, 1), (5, 1))
MIXED = ((20, 1), (0, 30), (7, 4))
LARGE = ((0, 40), (0, 24))
DRAFTS = ((20, 3), (40, 3))


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("spans", [DECODES, MIXED, LARGE, DRAFTS], ids=["decode", "mixed", "eager", "drafts"])
def test_a_step_waits_for_nothing(config: dict[str, Any], spans: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    with a_fake_device():
        steps, model = some_steps(config, tmp_path)
        launched = run_step(steps, model, sequences(*spans))
    assert {"_rope_and_cache", "_rms_norm"} <= set(launched), "the CUDA path was taken"
    assert ("_paged_decode" in launched) == any(now == 1 for _, now in spans)


@pytest.mark.parametrize(
    ("config", "num_groups", "kernels"),
    [
        (WINDOW, 1, {"_skinny_gemm"}),
        (LOCAL_AND_GLOBAL, 3, set()),
        (SINKS, 2, {"_route", "_grouped_gemm"}),
        (CHUNKS, 2, {"_route_by_sigmoid", "_grouped_gemm"}),
    ],
    ids=["window", "local and global", "sinks", "chunks"],
)
@pytest.mark.parametrize("spans", [DECODES, MIXED, LARGE, DRAFTS], ids=["decode", "mixed", "eager", "drafts"])
def test_a_step_of_several_kv_groups_waits_for_nothing_either(
    config: dict[str, Any], num_groups: int, kernels: set[str], spans: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    with a_fake_device():
        steps, model = some_steps(config, tmp_path)
        launched = run_step(steps, model, sequences(*spans, num_groups=num_groups))
    assert len(steps._limits.attention_windows) == num_groups
    of_few_rows = {"_skinny_gemm"} if spans in (MIXED, LARGE) else set()
    assert {"_rope_and_cache", "_rms_norm", *(kernels - of_few_rows)} <= set(launched)
    assert ("_paged_decode" in launched) == any(now == 1 for _, now in spans)


@pytest.mark.parametrize("spans", [DECODES, MIXED, LARGE, DRAFTS], ids=["decode", "mixed", "eager", "drafts"])
@pytest.mark.parametrize("quantised", [{}, FP8], ids=["", "float8 weights"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_step_of_latent_vectors_waits_for_nothing_either(
    spans: tuple[tuple[int, int], ...], quantised: dict[str, Any], kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    with a_fake_device():
        steps, model = some_steps(LATENT | quantised, tmp_path, kv_dtype)
        launched = run_step(steps, model, sequences(*spans))
    assert {"_route_by_sigmoid", "_grouped_gemm", "_latent_and_cache"} <= set(launched)
    assert ("_w8a8_block_fp8" in launched) == bool(quantised)
    assert ("_latent_decode" in launched) == (spans != LARGE), "of one token each, or of as many drafts"
    assert ("_latent_prefill" in launched) == (spans in (MIXED, LARGE))
    assert not {"_paged_decode", "_paged_prefill"} & set(launched)


def test_a_layer_takes_six_launches_for_few_rows(tmp_path: Path) -> None:
    with a_fake_device():
        steps, model = some_steps(DENSE, tmp_path)
        few, many = (run_step(steps, model, sequences(*spans)) for spans in (DECODES, LARGE))
    layer = ["_skinny_gemm", "_rope_and_cache", "_paged_decode", "_skinny_gemm", "_skinny_gemm", "_skinny_gemm"]
    num_layers = DENSE["num_hidden_layers"]
    assert few[: num_layers * len(layer)] == layer * num_layers
    assert not {"_skinny_gemm", "_silu_and_mul"} & set(few[num_layers * len(layer) :])
    assert "_skinny_gemm" not in many, "many rows are the matrix library's"


ROOM = AdapterConfig(max_loras=2, max_cpu_loras=2, is_updatable=True)


@pytest.mark.parametrize("config", [DENSE, DENSE | FP8, MIXTURE, LOCAL_AND_GLOBAL, SINKS])
@pytest.mark.parametrize("spans", [DECODES, MIXED, LARGE, DRAFTS], ids=["decode", "mixed", "eager", "drafts"])
def test_adapters_never_wait_and_launch_only_if_used(
    config: dict[str, Any], spans: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    with a_fake_device():
        num_groups = len(kv_groups_of(parse_model_config(config, {}, "")))
        plain, _ = some_steps(config, tmp_path)
        steps, model = some_steps(config, tmp_path, adapters=ROOM)
        batch = sequences(*spans, num_groups=num_groups)
        without = run_step(steps, model, batch)
        assert without == run_step(plain, plain._model, batch), "no row has an adapter: as if none were served"
        batch[0].request.adapter = Adapter("a", 1, b"")
        launched = run_step(steps, model, batch)
    assert not {"_lora_shrink", "_lora_expand"} & set(without)
    projections = 2 if "num_experts" in config else 4
    count = config["num_hidden_layers"] * projections
    assert (launched.count("_lora_shrink"), launched.count("_lora_expand")) == (count, count)
    assert "_skinny_gemm" not in launched


def test_adapter_kernels_are_compiled_before_first_request(tmp_path: Path) -> None:
    with a_fake_device():
        steps, _ = some_steps(DENSE, tmp_path, adapters=ROOM)
        with record_launches() as launches, NoWaiting():
            steps.warm_up()
        compiled = variants([launch for launch in launches if "lora" in launch.kernel.name])
        for spans in (DECODES, MIXED, LARGE, DRAFTS):
            batch = sequences(*spans)
            batch[0].request.adapter = Adapter("a", 1, b"")
            inputs, _ = flatten(batch, block_size=BLOCK_SIZE, max_decode_tokens=1 << 30, with_adapters=True)
            with record_launches() as launches, NoWaiting():
                steps.run(inputs)
            assert variants([launch for launch in launches if "lora" in launch.kernel.name]) <= compiled


@pytest.mark.parametrize("config", [DENSE | FP8, WIDE_MIXTURE | FP8], ids=["dense", "mixture"])
@pytest.mark.parametrize("spans", [DECODES, MIXED, LARGE], ids=["decode", "mixed", "eager"])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_and_caches_wait_for_nothing_either(
    config: dict[str, Any], spans: tuple[tuple[int, int], ...], kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    with a_fake_device():
        steps, model = some_steps(config, tmp_path, kv_dtype)
        launched = run_step(steps, model, sequences(*spans))
    assert {"_rope_and_cache", "_rms_norm", "_quantize_groups", "_w8a8_block_fp8"} <= set(launched)
    assert "_skinny_gemm" not in launched, "those are of 16 bits"
    assert ("_grouped_gemm" in launched) == ("num_experts" in config)


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "seed": 1}])
def test_random_sampling_waits_for_nothing_either(sampling: dict[str, Any], tmp_path: Path) -> None:
    with a_fake_device():
        steps, model = some_steps(DENSE, tmp_path)
        assert "_sample" in run_step(steps, model, sequences(*DECODES), **sampling)


@pytest.mark.parametrize(
    ("sampling", "kernels"),
    [
        ({"logprobs": 0}, set()),
        ({"logprobs": 5, "temperature": 0.5}, {"_sample"}),
        ({"repetition_penalty": 1.2}, {"_edit_logits"}),
        ({"presence_penalty": 0.2, "frequency_penalty": -0.1, "logprobs": 2}, {"_edit_logits"}),
        ({"min_tokens": 9, "stop_token_ids": (4, 5)}, {"_ban_tokens"}),
        ({"logit_bias": {3: 1.0}, "temperature": 1.0, "seed": 3}, {"_edit_logits", "_sample"}),
        ({"allowed_tokens": token_mask((3, 4, 7))}, {"_edit_logits"}),
        ({"bad_words": ((3,), (1, 5, 7), (5, 2, 8))}, {"_ban_tokens"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sampling_features_never_wait(sampling: dict[str, Any], kernels: set[str], tmp_path: Path) -> None:
    with a_fake_device():
        steps, model = some_steps(DENSE, tmp_path)
        launched = run_step(steps, model, sequences(*DECODES), **sampling)
    assert set(launched) & {"_edit_logits", "_ban_tokens", "_sample"} == kernels


def test_the_judgement_of_a_prompt_waits_for_nothing() -> None:
    with a_fake_device():
        raw, tokens = torch.empty(3, 304, device=CUDA), torch.empty(3, dtype=torch.int64, device=CUDA)
        scores = ScoresInFlight(Mark(torch.device("cpu")))
        with NoWaiting():
            scores.add(raw.log_softmax(dim=-1), tokens, [4, 5, 6], [2, 0, 1])
    assert scores.parts[0][0].shape == (3, 2 * (1 + 2))


def test_step_kernels_are_compiled_before_first_request(tmp_path: Path) -> None:
    with a_fake_device():
        steps, _ = some_steps(DENSE, tmp_path)
        with record_launches() as launches, NoWaiting():
            steps.warm_up()
    wanted = {"_edit_logits", "_ban_tokens", "_argmax", "_sample", "_skinny_gemm"}
    assert wanted <= {launch.kernel.name for launch in launches}
    dtypes = {launch.arguments["logits"].dtype for launch in launches if launch.kernel.name == "_sample"}
    assert dtypes == {torch.bfloat16, torch.float32}, "logits of the model, and edited ones"


TP2, PP2, DP2_EP = Layout(tensor=2), Layout(pipeline=2), Layout(data=2, expert=True)
TP_CALLS = ["all_reduce"] * 5  # the embedding, and twice in each of two layers
EP_CALLS = ["all_gather", "all_gather", "reduce_scatter"] * 2  # rows and router logits out, sums back


@pytest.mark.parametrize(
    ("config", "layout", "rank", "inside", "outside"),
    [
        pytest.param(DENSE, TP2, 0, TP_CALLS, ["broadcast", "gather"], id="tp2"),
        pytest.param(DENSE, TP2, 1, TP_CALLS, ["broadcast", "gather"], id="tp2, the other"),
        pytest.param(MIXTURE, DP2_EP, 0, EP_CALLS, [], id="dp2 ep"),
        pytest.param(LATENT, TP2, 0, ["all_reduce"] * 7, ["broadcast", "gather"], id="latent tp2"),
        pytest.param(LATENT, DP2_EP, 1, EP_CALLS, [], id="latent dp2 ep"),
        pytest.param(LATENT, PP2, 0, [], ["send"], id="latent pp2, first stage"),
        pytest.param(DENSE, PP2, 0, [], ["send"], id="pp2, first stage"),
        pytest.param(DENSE, PP2, 1, [], ["recv"], id="pp2, last stage"),
    ],
)
@pytest.mark.parametrize("spans", [DECODES, MIXED, LARGE], ids=["decode", "mixed", "eager"])
def test_multi_rank_step_never_waits_and_captures_collectives(
    config: dict[str, Any],
    layout: Layout,
    rank: int,
    inside: list[str],
    outside: list[str],
    spans: tuple[tuple[int, int], ...],
    tmp_path: Path,
) -> None:
    ranks = Ranks(layout, rank)
    with a_fake_device(), a_fake_nccl(ranks.recorder) as calls:
        steps, model = some_steps(config, tmp_path, ranks=ranks)
        with record_launches(), NoWaiting():
            steps.capture_all(lambda done, of: None)
        assert not any(name in ("send", "recv") for name, _ in calls), "stages capture without each other"
        calls.clear()
        inputs, _ = flatten(sequences(*spans), block_size=BLOCK_SIZE, max_decode_tokens=1 << 30)
        with record_launches(), NoWaiting():
            hidden, wanted = steps.run(inputs, [(0, 0)])
            if layout is not PP2:
                model.logits(hidden, wanted)
    if spans == LARGE:
        assert sorted(calls) == sorted((name, False) for name in inside + outside)
        return
    assert [name for name, is_inside in calls if is_inside] == inside
    assert [name for name, is_inside in calls if not is_inside] == outside


def a_random_batch(dice: random.Random) -> list[ScheduledSequence]:
    """Up to 8 sequences of 64 tokens in all: decodes, chunks or both, some of which sample."""
    longest, spans, left = dice.choice((1, 3, 40)), list[tuple[int, int]](), 64
    for _ in range(dice.randint(1, 8)):
        now = dice.randint(1, min(longest, left - 7 + len(spans)))
        spans.append((dice.randint(0, MAX_LEN - now - 1), now))
        left -= now
    batch = sequences(*spans)
    for number, sequence in enumerate(batch):
        sequence.request.block_tables[0] = list(range(1, 1 + MAX_LEN // BLOCK_SIZE))
        sequence.samples = number == 0 or dice.random() < 0.8
    return batch


RANDOM_SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 5, "seed": 1},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"bad_words": ((3,), (1, 5, 7)), "temperature": 0.5},
)


@pytest.mark.parametrize("config", [DENSE, WIDE_MIXTURE | FP8], ids=["dense", "float8 mixture"])
def test_steps_launch_no_variant_of_a_kernel_that_start_up_did_not(config: dict[str, Any], tmp_path: Path) -> None:
    dice = random.Random(7)
    with a_fake_device():
        steps, model = some_steps(config, tmp_path)
        with record_launches() as warm, NoWaiting(is_start_up=True):  # as the profile, init_kv_cache and start_steps do
            warm_up_attention(
                torch.zeros(1, 4, 16, dtype=torch.bfloat16, device=CUDA),
                steps._kv_cache.keys[0],
                steps._kv_cache.values[0],
            )
            logits = model.logits(
                torch.zeros(7, 64, dtype=torch.bfloat16, device=CUDA), torch.zeros(3, device=CUDA).long()
            )
            assert logits is not None
            choose_limited(logits, [Request.of("r", [1], Sampling(), arrival_time=0.0)] * 3)
            steps.warm_up()
            steps.capture_all(lambda done, of: None)
        known = variants(warm)
        for number in range(24):
            batch = a_random_batch(dice)
            inputs, _ = flatten(batch, block_size=BLOCK_SIZE, max_decode_tokens=1 << 30)
            params = Sampling(**{"temperature": 0.0, **RANDOM_SAMPLING[number % len(RANDOM_SAMPLING)]})
            rows = [DeviceRow(Request.of("r", [1, 5, 5], params, arrival_time=0.0)) for _ in inputs.sampled]
            with record_launches() as served, NoWaiting():
                logits = model.logits(*steps.run(inputs, [(0, 0)]))
                assert logits is not None
                steps.sample(logits, rows)
            assert variants(served) <= known, f"{[(s.start, s.num_tokens) for s in batch]}, {params}"


def test_the_check_itself_sees_a_wait(tmp_path: Path) -> None:
    with a_fake_device():
        x = torch.empty(3, device=CUDA)
        with NoWaiting():
            for wait in (x.sum().item, x.tolist, x.cpu, lambda: torch.zeros(3, device="cpu").to(CUDA)):
                with pytest.raises(Waited):
                    wait()
