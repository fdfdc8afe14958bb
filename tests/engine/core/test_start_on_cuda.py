"""A whole engine on a fake CUDA device, from its configuration to its last token.

Every host line that runs on a GPU is executed, except CUDA's graphs and events. Numbers are zeros. The tests check that
the engine starts, that start-up launches every kernel variant used by serving, and that the KV cache is mapped as
reported.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from calling_recorder import CallingRecorder, all_steps_follow
from fake_cuda import FakeCuda
from fake_device import CUDA, NoWaiting, a_fake_device, variants
from fake_nccl import a_fake_nccl, groups_of
from llguidance import LLMatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from trimtab_engine.config.engine import EncoderMode, EngineConfig
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.device import device as device_module
from trimtab_engine.device import swap_cache
from trimtab_engine.device.address_range import AddressRange, Span
from trimtab_engine.device.cuda_driver import CudaDriver
from trimtab_engine.device.mapped_range import CudaMemory, MappedRange, Owner
from trimtab_engine.device.side_stream import HostSideStream
from trimtab_engine.errors import NotSupportedError
from trimtab_engine.executor import start as rank_start
from trimtab_engine.executor.messages import Profiled, RankLoaded, RankReport, StartedSteps, StartSteps, Step
from trimtab_engine.messages.admin import Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import MEANINGS_BYTES, Modality, MultiModalItem, Patches
from trimtab_engine.multimodal.items import Span as ItemSpan
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.runner import start
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.pooling import Pooling, PoolingMethod
from trimtab_engine.scheduling.sampling import Sampling, token_mask
from trimtab_engine.weights.dummy import DummySource
from trimtab_kernels.launch import jit
from trimtab_kernels.launch.jit import Launch, record_launches
from trimtab_modelspec.kv_groups import uniform_group
from trimtab_modelspec.memory_formula import MemoryFormula

pytestmark = pytest.mark.skipif(not jit.HAS_TRITON, reason="records launches of Triton kernels")
DEVICE_BYTES, USED_BYTES = 4 << 30, 100 << 20
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
WINDOW = DENSE | {"architectures": ["MistralForCausalLM"], "sliding_window": 40}
LOCAL_AND_GLOBAL = DENSE | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
SINKS = DENSE | {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 40,
    "attention_bias": True,
}
CHUNKS = DENSE | {
    "architectures": ["Llama4ForCausalLM"],
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 40,
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
SEEING: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": DENSE | {"model_type": "llama"},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
    "tie_word_embeddings": True,
}
"""Its text is served unless a limit allows images."""
TOWER_LAYERS = 3
WATCHING: dict[str, Any] = DENSE | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 72, "depth": TOWER_LAYERS, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    },
}  # fmt: skip
SEES = {"limit_mm_per_prompt": {"image": 4, "video": 1}, "max_num_encoder_input_tokens": 40, "encoder_cache_size": 60}
TILED: dict[str, Any] = CHUNKS | {
    "architectures": ["Llama4ForConditionalGeneration"],
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": TOWER_LAYERS, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 4, "vision_output_dim": 24, "projector_input_dim": 24,
        "projector_output_dim": 24,
    },
}  # fmt: skip
SEES_TILES = SEES | {"limit_mm_per_prompt": {"image": 4}}
DRAFTS = {
    "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    "num_speculative_tokens": 2,
    "num_speculative_tokens_cap": 2,
}
METHODS: tuple[PoolingMethod, ...] = get_args(PoolingMethod)
FOUR_GROUPS = {"num_gpu_blocks_override": 48}
"""One request of maximum length takes 40 blocks."""
SWAP = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20, "swap_space_bytes_cap": 1 << 20}
TORCH_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "NVIDIA H200",
    "get_device_capability": lambda *_: (9, 0),
    "mem_get_info": lambda *_: (DEVICE_BYTES - USED_BYTES, DEVICE_BYTES),
    "memory_reserved": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "synchronize": lambda *_: None,
}


class Zeros(TorchFunctionMode):
    """Host reads return zero; device tensors have correct shapes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is torch.Tensor.tolist:
            return np.zeros(args[0].shape, dtype=np.int64).tolist()
        if func is torch.Tensor.item:
            return 0
        if func is torch.Tensor.numpy and isinstance(args[0], FakeTensor):
            return np.zeros(args[0].shape, dtype=np.float32)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.tensor and torch.device(keywords.get("device") or "cpu").type == "cuda":
            values = np.array(args[0])
            made = torch.int64 if values.dtype.kind == "i" else torch.float32
            return torch.empty(values.shape, dtype=keywords.get("dtype") or made, device=CUDA)
        return func(*args, **keywords)


class FakeCudaMemory(CudaMemory):
    """Ranges of the fake driver, with fake tensors over them."""

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        def tensor_at(_: int, size: int, owner: Owner) -> torch.Tensor:
            whole = torch.empty(size, dtype=torch.uint8, device=CUDA)
            whole.owner = owner  # type: ignore[attr-defined]  # kept alive
            return whole

        if self._driver is None:
            return super().reserve(regions, page_bytes)
        return MappedRange(regions, page_bytes, self._driver, tensor_at=tensor_at, synchronize=lambda: None)


@contextmanager
def a_fake_gpu() -> Iterator[FakeCuda]:
    """Fake all CUDA calls of an engine. Yield the memory driver."""
    driver = FakeCuda()
    memory = FakeCudaMemory(CUDA, DEVICE_BYTES, CudaDriver(driver, 0))
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in TORCH_CUDA.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(device_module, "open_cuda_memory", lambda device, device_bytes: memory)
        patch.setattr(device_module, "c_compiler", lambda: "cc")
        patch.setattr(device_module, "pin_for_cuda", lambda address, num_bytes: lambda: None)
        patch.setattr(swap_cache, "side_stream_of", lambda device: HostSideStream())
        patch.setattr(start, "recorder_of", lambda device: CallingRecorder())
        patch.setattr(DummySource, "_whole", lambda source, name: torch.empty(source.shapes()[name], device=CUDA))
        with a_fake_device(), NoWaiting(is_start_up=True), Zeros():
            yield driver


def serve(engine: Engine) -> int:
    """More requests than there are blocks for, greedy and random ones. Returns the steps."""
    for number in range(12):
        sampling = Sampling(max_tokens=8, temperature=0.7 * (number % 2), ignore_eos=True)
        engine.add(AddRequest(str(number), [1 + number] * (3 + 9 * number), sampling, arrival_time=0.0))
    num_steps = 0
    while engine.has_work and num_steps < 500:
        engine.step()
        num_steps += 1
    engine.check_integrity()
    return num_steps


def a_config(model: dict[str, Any], folder: Path, changes: dict[str, Any]) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(model))
    values: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_seqs_cap": 8,
        "max_num_batched_tokens": 64,
        "max_num_batched_tokens_cap": 64,
        "num_gpu_blocks_override": 24,
    }
    return EngineConfig(model=str(folder), **values | changes)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(DENSE, {}, id="dense"),
        pytest.param(DENSE, {"enforce_eager": True, "async_scheduling": False}, id="eager"),
        pytest.param(DENSE, {"kv_cache_dtype": "fp8"}, id="float8 cache"),
        pytest.param(DENSE, {"quantization": "fp8"}, id="float8 weights"),
        pytest.param(DENSE, DRAFTS, id="drafts"),
        pytest.param(MIXTURE, {}, id="mixture"),
        pytest.param(SEEING, {}, id="text half"),
        pytest.param(DENSE, SWAP, id="swap"),
        pytest.param(WINDOW, {}, id="window"),
        pytest.param(LOCAL_AND_GLOBAL, SWAP | FOUR_GROUPS, id="local and global, swap"),
        pytest.param(LOCAL_AND_GLOBAL, {"kv_cache_dtype": "fp8"} | FOUR_GROUPS, id="local and global, float8 cache"),
        pytest.param(SINKS, DRAFTS, id="sinks, drafts"),
        pytest.param(SINKS, {"enforce_eager": True, "async_scheduling": False}, id="sinks, eager"),
        pytest.param(CHUNKS, {}, id="chunks"),
        pytest.param(CHUNKS, {"kv_cache_dtype": "fp8"} | DRAFTS, id="chunks, float8 cache and drafts"),
        pytest.param(LATENT, SWAP, id="latent, swap"),
        pytest.param(LATENT, {"enforce_eager": True, "async_scheduling": False}, id="latent, eager"),
        pytest.param(LATENT, {"kv_cache_dtype": "fp8"} | DRAFTS, id="latent, float8 cache and drafts"),
        pytest.param(LATENT, {"quantization": "fp8"}, id="latent, float8 weights"),
    ],
)
def test_an_engine_starts_serves_and_compiles_nothing_then(
    model: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    config = a_config(model, tmp_path, changes)
    with a_fake_gpu() as driver:
        with record_launches() as at_start:
            engine, ready = start_engine(config, lambda stage, percent: None, lambda: 0.0)
        with record_launches() as served:
            assert 0 < serve(engine) < 500
        assert ready.num_blocks == config.num_gpu_blocks_override
        assert engine.ledger().kinds["kv_mapped"] <= driver.mapped_bytes
        engine.close()
    assert served
    assert variants(served) <= variants(at_start)


GRIDS = ((1, 2, 2), (1, 4, 6), (1, 8, 8), (1, 10, 6), (1, 2, 14), (1, 8, 20), (2, 4, 6), (3, 2, 10))
NUM_PROMPTS = 2 * len(GRIDS)


def an_item(number: int) -> MultiModalItem:
    return _black(number, GRIDS[number % len(GRIDS)], row_size=3 * 2 * 4 * 4)


def a_tile(number: int) -> MultiModalItem:
    return _black(number, (1, 8, 8), row_size=3 * 4 * 4)


def _black(number: int, grid: tuple[int, int, int], row_size: int) -> MultiModalItem:
    num_patches = grid[0] * grid[1] * grid[2]
    patches = Patches(row_size, bytes(num_patches * row_size), bytes(3 * MEANINGS_BYTES))
    kind: Modality = "video" if grid[0] > 1 else "image"
    return MultiModalItem(kind, str(number).encode(), num_patches // 4, grid, patches)


def serve_images(
    engine: Engine, item_of: Callable[[int], MultiModalItem], most_items: int = 2
) -> dict[str, dict[str, int]]:
    """Serve prompts with images and videos of all sizes and text prompts without waiting; return the counts."""
    for number in range(NUM_PROMPTS):
        token_ids, spans = [5] * (2 + number), list[ItemSpan]()
        for item in (item_of(number + more) for more in range(number % (1 + most_items))):
            spans.append(ItemSpan(len(token_ids), item))
            token_ids += [90] * item.num_tokens + [5, 6]
        sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(str(number), token_ids, sampling, arrival_time=0.0, spans=tuple(spans)))
    counted: dict[str, dict[str, int]] = {"graph_steps": {}, "eager_steps": {}}
    reasons: dict[str, str] = {}
    for _ in range(500):
        report = engine.step()
        reasons |= {o.request_id: o.finish_reason for o in report.outputs if o.finish_reason}
        for name, sums in counted.items():
            for kind, count in getattr(report.stats, name).items():
                sums[kind] = sums.get(kind, 0) + count
        if not engine.has_work:
            break
    engine.check_integrity()
    assert set(reasons.values()) == {"length"}
    assert len(reasons) == NUM_PROMPTS
    return counted


@dataclass(frozen=True)
class AttentionWindow:
    """A multimodal model, its limits, and its inputs."""

    model: dict[str, Any]
    limits: dict[str, Any]
    item_of: Callable[[int], MultiModalItem]
    modalities: tuple[Modality, ...]


OF_WINDOWS = AttentionWindow(WATCHING, SEES, an_item, ("image", "video"))
OF_TILES = AttentionWindow(TILED, SEES_TILES, a_tile, ("image",))


@pytest.mark.parametrize(
    ("attention_window", "changes"),
    [
        pytest.param(OF_WINDOWS, {}, id="graphs"),
        pytest.param(OF_WINDOWS, {"enforce_eager": True, "async_scheduling": False}, id="eager"),
        pytest.param(OF_WINDOWS, DRAFTS, id="drafts"),
        pytest.param(OF_WINDOWS, {"dtype": "float32"}, id="float32"),
        pytest.param(OF_TILES, {}, id="tiles"),
        pytest.param(OF_TILES, {"enforce_eager": True, "async_scheduling": False}, id="tiles, eager"),
        pytest.param(OF_TILES, DRAFTS, id="tiles, drafts"),
        pytest.param(OF_TILES, {"dtype": "float32"}, id="tiles, float32"),
        pytest.param(OF_TILES, {"kv_cache_dtype": "fp8"}, id="tiles, float8 cache"),
    ],
)
def test_an_engine_that_sees_starts_serves_and_compiles_nothing_then(
    attention_window: AttentionWindow, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Images and videos of any size, with concurrent text decoding."""
    with a_fake_gpu():
        with record_launches() as at_start:
            engine, ready = start_engine(
                a_config(attention_window.model, tmp_path, attention_window.limits | changes),
                lambda stage, percent: None,
                lambda: 0.0,
            )
        waits = "speculative" in changes or "async_scheduling" in changes  # for sampled, not for computed tokens
        with record_launches() as served, nullcontext() if waits else NoWaiting():
            counted = serve_images(engine, attention_window.item_of)
        engine.close()
    assert ready.modalities == list(attention_window.modalities)
    assert variants(served) <= variants(at_start)
    if "enforce_eager" in changes:
        assert counted["eager_steps"].keys() == {"off"}
    else:
        assert counted["eager_steps"]["images"] > 3
        assert counted["graph_steps"]["full"] > 2


def test_images_on_cuda_are_rejected_by_architecture(tmp_path: Path) -> None:
    config = a_config(SEEING, tmp_path, {"limit_mm_per_prompt": {"image": 1}})
    with (
        a_fake_gpu(),
        pytest.raises(
            NotSupportedError,
            match=r"not supported on CUDA for Llava.*: transformers' own code .*; serve text only, with --l",
        ),
    ):
        start_engine(config, lambda stage, percent: None, lambda: 0.0)


EXTREMES: list[dict[str, Any]] = [
    {"top_k": 2**63 - 1},
    {"top_k": 1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1 + 127},
    {"top_p": 5e-324},
    {"min_p": 1.0},
    {"temperature": 100.0},
    {"temperature": 1e-5},
    {"repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"logprobs": 2**31},
    {"prompt_logprobs": 2**31},
    {"logit_bias": {303: 100.0, 0: -100.0}},
    {"allowed_tokens": token_mask((303,))},
    {"stop_token_ids": (2**31 - 1,), "min_tokens": 8},
    {"min_tokens": 2**63 - 1, "bad_words": ((303, 2**31 - 1), (303,))},
    {"max_tokens": 2**63 - 1},
]
"""Extreme values accepted by the API."""


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True, "async_scheduling": False}, DRAFTS])
def test_every_number_of_a_request_is_served_at_its_limits(changes: dict[str, Any], tmp_path: Path) -> None:
    config = a_config(DENSE, tmp_path, {**changes, "max_model_len": 48})  # the number reported if all are requested
    with a_fake_gpu(), record_launches():
        engine, _ = start_engine(config, lambda stage, percent: None, lambda: 0.0)
        for number, extreme in enumerate(EXTREMES):
            sampling = Sampling(**{"max_tokens": 6, "ignore_eos": True, **extreme})
            engine.add(AddRequest(str(number), [7] * 20, sampling, arrival_time=0.0))
        reasons: dict[str, str] = {}
        for _ in range(2000):
            reasons |= {o.request_id: o.finish_reason for o in engine.step().outputs if o.finish_reason}
            if not engine.has_work:
                break
        engine.close()
    assert reasons == {str(number): "length" for number in range(len(EXTREMES))}


def test_steps_with_grammars_wait_for_nothing_of_the_device(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The device always chooses token 0, which the grammar allows among others. Requests without a grammar run
    concurrently.
    """
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    grammar = LLMatcher.grammar_from_regex("(.|\\n){1,200}")
    with a_fake_gpu(), record_launches() as launches:
        engine, _ = start_engine(a_config(DENSE, tmp_path, {}), lambda stage, percent: None, lambda: 0.0)
        known = variants(launches)
        for number in range(12):
            held: dict[str, Any] = {"grammar": grammar, "logprobs": 1 if number % 4 else None} if number % 2 else {}
            sampling = Sampling(max_tokens=8, temperature=0.7 * (number % 3), ignore_eos=True, **held)
            engine.add(AddRequest(str(number), [1 + number] * (3 + 9 * number), sampling, arrival_time=0.0))
        while engine.is_building and not engine.has_work:
            engine.step()
        reasons: dict[str, str] = {}

        def serve_all() -> None:
            for _ in range(100_000):
                reasons.update({o.request_id: o.finish_reason for o in engine.step().outputs if o.finish_reason})
                if not (engine.has_work or engine.is_building):
                    return

        all_steps_follow(engine, serve_all)
        engine.check_integrity()
        engine.close()
    assert reasons == {str(number): "length" for number in range(12)}
    assert variants(launches) == known


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}, SWAP, DRAFTS], ids=["", "eager", "swap", "drafts"])
def test_pooling_among_generation_never_waits_for_device(changes: dict[str, Any], tmp_path: Path) -> None:
    """Steps follow each other, and nothing is compiled for them that start-up has not compiled."""
    with a_fake_gpu(), record_launches() as launches:
        engine, _ = start_engine(a_config(DENSE, tmp_path, changes), lambda stage, percent: None, lambda: 0.0)
        known = variants(launches)
        for number in range(12):
            prompt = [1 + number] * (3 + 9 * number)
            sampling = Sampling(max_tokens=8, temperature=0.7 * (number % 2), ignore_eos=True)
            engine.add(AddRequest(f"tokens-{number}", prompt, sampling, arrival_time=0.0))
            for method in METHODS:
                pooling = Pooling(method, normalize=False)
                engine.add(AddRequest(f"{method}-{number}", prompt, sampling, arrival_time=0.0, pooling=pooling))
        pooled: dict[str, bytes] = {}
        reasons: dict[str, str] = {}

        def serve_all() -> None:
            for _ in range(500):
                for output in engine.step().outputs:
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
                    if output.pooled is not None:
                        pooled[output.request_id] = output.pooled
                if not engine.has_work:
                    return

        if changes is DRAFTS:
            serve_all()
        else:
            all_steps_follow(engine, serve_all)
        engine.check_integrity()
        engine.close()
    assert {name for name, reason in reasons.items() if reason == "stop"} == pooled.keys()
    assert sorted(pooled) == sorted(f"{method}-{number}" for number in range(12) for method in METHODS)
    assert set(pooled.values()) == {bytes(4 * DENSE["hidden_size"])}
    assert variants(launches) == known


class OtherRank:
    """Replacement of the workers: one further rank that acknowledges every message."""

    told: list[Any]

    def __init__(self, config: EngineConfig, layout: Layout, on_death: Any = None) -> None:
        self.layout, self.rank = layout, layout.driver()
        type(self).told = []

    def join(self) -> RankGroups:
        return groups_of(self.layout, self.rank)

    def send(self, message: Any) -> None:
        self.told.append(message)

    def answers(self, kind: type) -> list[Any]:
        other = 1 - self.rank
        report = RankReport(other, "host", 1, "cuda:1", 0, 0, 0, (0, 0), 2, 1)
        answers = (RankLoaded(report), Profiled(other, A_FORMULA), StartedSteps(other, 1 << 20, 2 << 20))
        return [answer for answer in answers if isinstance(answer, kind)]

    def close(self) -> None:
        """There is no process."""


A_FORMULA = MemoryFormula(
    device_bytes=DEVICE_BYTES,
    gpu_memory_utilization="0.9",
    other_bytes=USED_BYTES,
    weights_bytes=1 << 20,
    activations_peak_bytes=1 << 20,
    workspace_bytes=0,
    graphs_bytes=0,
    communicator_bytes=0,
    kv_groups=(uniform_group(2, 1, 16),),
    kv_dtype_bytes=2,
    block_size=16,
    max_model_len=256,
    max_num_batched_tokens=2048,
)


@pytest.mark.parametrize(
    ("model", "layout", "inside", "outside"),
    [
        pytest.param(
            DENSE, {"tensor_parallel_size": 2}, {"all_reduce"}, {"all_reduce", "broadcast", "gather"}, id="dense tp2"
        ),
        pytest.param(
            MIXTURE,
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"all_reduce"},
            {"all_reduce", "broadcast", "gather"},
            id="mixture tp2 ep",
        ),
        pytest.param(DENSE, {"pipeline_parallel_size": 2}, set(), {"recv"}, id="dense pp2"),
        pytest.param(
            LOCAL_AND_GLOBAL,
            {"tensor_parallel_size": 2} | FOUR_GROUPS,
            {"all_reduce"},
            {"all_reduce", "broadcast", "gather"},
            id="windows tp2",
        ),
        pytest.param(
            SINKS,
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"all_reduce"},
            {"all_reduce", "broadcast", "gather"},
            id="sinks tp2 ep",
        ),
        pytest.param(CHUNKS, {"pipeline_parallel_size": 2}, set(), {"recv"}, id="chunks pp2"),
        pytest.param(
            LATENT,
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"all_reduce"},
            {"all_reduce", "broadcast", "gather"},
            id="latent tp2 ep",
        ),
        pytest.param(LATENT, {"pipeline_parallel_size": 2}, set(), {"recv"}, id="latent pp2"),
    ],
)
def test_the_core_s_rank_of_several_does_so_too(
    model: dict[str, Any], layout: dict[str, Any], inside: set[str], outside: set[str], tmp_path: Path
) -> None:
    recorder = CallingRecorder()
    with a_fake_gpu(), a_fake_nccl(recorder) as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "recorder_of", lambda device: recorder)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(rank_start, "Workers", OtherRank)
        with record_launches() as at_start:
            engine, _ = start_engine(a_config(model, tmp_path, layout), lambda stage, percent: None, lambda: 0.0)
        calls.clear()
        with record_launches() as served:
            assert 0 < serve(engine) < 500
        assert engine.ledger().kinds["workspace"] > 0
        engine.close()
    assert not variants(served) - variants(at_start), "compiled while serving"
    assert {name for name, is_inside in calls if is_inside} == inside
    assert {name for name, is_inside in calls if not is_inside} == outside
    steps = [message for message in OtherRank.told if isinstance(message, Step)]
    assert any(isinstance(message, StartSteps) for message in OtherRank.told)
    assert any(step.feed for step in steps) == ("broadcast" in outside), "tokens reach the other rank on the device"


@pytest.mark.parametrize("mode", ["weights", "data"])
@pytest.mark.parametrize("attention_window", [OF_WINDOWS, OF_TILES], ids=["windows", "tiles"])
def test_the_core_s_rank_of_two_that_see_does_so_too(
    attention_window: AttentionWindow, mode: EncoderMode, tmp_path: Path
) -> None:
    """Ranks that shard the encoder reduce twice per layer; ranks that divide items once per step, in addition to the
    embedding and twice per language model layer.
    """
    recorder = CallingRecorder()
    with a_fake_gpu(), a_fake_nccl(recorder) as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "recorder_of", lambda device: recorder)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(rank_start, "Workers", OtherRank)
        config = a_config(
            attention_window.model,
            tmp_path,
            attention_window.limits | {"tensor_parallel_size": 2, "mm_encoder_tp_mode": mode},
        )
        with record_launches() as at_start:
            engine, _ = start_engine(config, lambda stage, percent: None, lambda: 0.0)
        calls.clear()
        with record_launches() as served, NoWaiting():
            counted = serve_images(engine, attention_window.item_of)
        engine.close()
    assert not variants(served) - variants(at_start), "compiled while serving"
    assert {name for name, is_inside in calls if is_inside} == {"all_reduce"}
    steps = [message for message in OtherRank.told if isinstance(message, Step)]
    assert sum(bool(step.inputs.placed) for step in steps) == counted["eager_steps"]["images"]
    num_items = sum(len(step.inputs.missing) for step in steps)
    num_outside = sum(name == "all_reduce" and not is_inside for name, is_inside in calls)
    num_eager = sum(counted["eager_steps"].values())
    computing = num_items if mode == "weights" else sum(bool(step.inputs.missing) for step in steps)
    per_item = 2 * TOWER_LAYERS if mode == "weights" else 1
    assert num_outside == 5 * num_eager + per_item * computing


def test_asleep_nothing_is_mapped_and_awake_graphs_are_recorded_again(tmp_path: Path) -> None:
    with a_fake_gpu() as driver, record_launches() as launches:
        engine, _ = start_engine(a_config(DENSE, tmp_path, {}), lambda stage, percent: None, lambda: 0.0)
        known, mapped = variants(launches), driver.mapped_bytes
        for level in (1, 2):
            assert engine.lifecycle(Sleep(level, "abort"))[0] == 200
            assert driver.mapped_bytes == 0
            assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
            assert driver.mapped_bytes == mapped
            assert 0 < serve(engine) < 500
        engine.close()
    assert variants(launches) == known


WRITES = {"_rope_and_cache", "_latent_and_cache", "_reshape_and_cache"}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(DENSE, {}, id="dense"),
        pytest.param(DENSE, {"enforce_eager": True}, id="eager"),
        pytest.param(DENSE, DRAFTS, id="drafts"),
        pytest.param(LOCAL_AND_GLOBAL, {}, id="local and global"),
        pytest.param(SINKS, {}, id="sinks"),
        pytest.param(CHUNKS, {}, id="chunks"),
        pytest.param(LATENT, {}, id="latent"),
    ],
)
def test_layers_write_all_rows_before_attention(
    model: dict[str, Any], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests share blocks in the step that computes them. One launch per layer writes the keys and values of all
    rows, and the launches that read them come later in the same stream.
    """
    launches: list[Launch] = []
    begins: list[int] = []
    run = ModelRunner.run

    def note_and_run(runner: ModelRunner, *arguments: Any) -> Any:
        begins.append(len(launches))
        return run(runner, *arguments)

    monkeypatch.setattr(ModelRunner, "run", note_and_run)
    rows = {"max_num_batched_tokens": 512, "max_num_batched_tokens_cap": 512, "num_gpu_blocks_override": 96}
    with a_fake_gpu():
        with record_launches():
            config = a_config(model, tmp_path, rows | changes)
            engine, _ = start_engine(config, lambda stage, percent: None, lambda: 0.0)
        with record_launches() as launches:
            begins.clear()
            cached = 0
            for number in range(8):
                sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
                engine.add(AddRequest(str(number), [7] * (33 + number), sampling, arrival_time=0.0))
            while engine.has_work:
                cached += engine.step().stats.prefix_cache_hits
        engine.close()
    assert cached >= 7 * 32
    num_reads = 0
    for first, last in pairwise([*begins, len(launches)]):
        num_writes, written = 0, dict[int, int]()
        for launch in launches[first:last]:
            cache = launch.arguments.get("key_cache", launch.arguments.get("cache"))
            if cache is None:
                continue
            if launch.kernel.name in WRITES:
                num_writes += 1
                written[id(cache)] = launch.grid[0]  # layers of other KV groups have the same memory, and other blocks
            else:
                num_reads += 1
                assert written[id(cache)] >= launch.arguments["query"].shape[0], "rows are read that are not written"
        assert num_writes == model["num_hidden_layers"]
    assert num_reads >= len(begins) * model["num_hidden_layers"]
