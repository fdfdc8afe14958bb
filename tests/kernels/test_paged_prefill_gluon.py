"""The warp-specialised prefill attention against the reference. Without a GPU, its source runs as plain Python, one CTA
after another, in an order derived from a seed (see gluon_stand_in for what this checks); on a Hopper GPU it runs as
compiled.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gluon_stand_in import Box, GluonError, pointer, run_program, value
from trimtab_kernels import paged_prefill_gluon as gluon_module
from trimtab_kernels.launch.backends import KernelBackends, override_backends
from trimtab_kernels.launch.device_facts import A100, H200
from trimtab_kernels.launch.jit import HAS_TRITON, record_launches
from trimtab_kernels.paged_batch import PagedBatch, attend_paged_batch, warm_up_attention
from trimtab_kernels.paged_prefill import paged_prefill_reference, score_scale
from trimtab_kernels.paged_prefill_gluon import (
    HEAD_SIZES,
    ROWS,
    gluon_prefill_config,
    is_supported,
    paged_prefill_gluon,
)

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="its source is decorated by Triton")


def a_batch(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, ...]:
    """Return sequences (tokens before, tokens now) in a cache whose blocks are shuffled and whose free slots contain
    NaN.
    """
    generator = torch.Generator().manual_seed(3)
    lengths = [before + now for before, now in sequences]
    counts = [-(-length // block_size) for length in lengths]
    blocks = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    caches = [torch.full((sum(counts) + 1, block_size, kv_heads, size), float("nan")) for _ in range(2)]
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(own, dtype=torch.int32)
        for cache in caches:
            for number, block in enumerate(own):
                real = min(block_size, length - number * block_size)
                cache[block, :real] = torch.randn(real, kv_heads, size, generator=generator)
    starts = torch.tensor([0, *[now for _, now in sequences]]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]), heads, size, generator=generator).to(dtype)
    return query, *[cache.to(dtype) for cache in caches], tables, torch.tensor(lengths, dtype=torch.int32), starts


def as_python(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    *,
    seed: int = 0,
    scale: float = 0.25,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    module: ModuleType = gluon_module,
) -> torch.Tensor:
    """Run all CTAs of the launch in the stand-in."""
    num_blocks, block_size, kv_heads, size = keys.shape
    config = gluon_prefill_config(size)
    group = query.shape[1] // kv_heads
    box = [1, min(block_size, config.keys), size]
    num_q_blocks = query.shape[0] // (ROWS // group) + lengths.shape[0]
    output = torch.full_like(query, float("nan"))
    for program in range(kv_heads * num_q_blocks):
        arguments = {
            "query": pointer(query),
            "key_box": Box(keys.view(num_blocks, block_size, -1), box),
            "value_box": Box(values.view(num_blocks, block_size, -1), box),
            "output": pointer(output),
            "sinks": None if sinks is None else pointer(sinks),
            "block_tables": pointer(tables),
            "seq_lens": pointer(lengths),
            "query_starts": pointer(starts),
            "num_seqs": value(lengths.shape[0]),
            "num_q_blocks": value(num_q_blocks),
            "table_stride": tables.stride(0),
            "query_stride": query.stride(0),
            "output_stride": output.stride(0),
            "factor": score_scale(scale, key_scale, None),
            "value_scale": value_scale,
            "NUM_KV_HEADS": kv_heads,
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": ROWS,
            "KEYS": config.keys,
            "STAGES": config.stages,
            "WINDOW": window,
            "REGISTERS": (),
        }
        run_program(module, "_paged_prefill_gluon", arguments, program=program, seed=1000 * seed + program)
    return output


def check(batch: tuple[torch.Tensor, ...], *, seed: int = 0, **options: object) -> None:
    options = {"scale": 0.25, **options}
    expected = paged_prefill_reference(*batch, **options)  # type: ignore[arg-type]
    if ON_GPU:
        if not IS_HOPPER:
            pytest.skip("the kernel is for Hopper")
        found = paged_prefill_gluon(*batch, **options)  # type: ignore[arg-type]
    else:
        found = as_python(*batch, seed=seed, **options)  # type: ignore[arg-type]
    limit = 16 * torch.finfo(batch[0].dtype).eps
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


MIXES = [
    [(0, 1)],
    [(0, 64)],
    [(0, 200)],
    [(13, 70), (0, 1)],
    [(500, 40), (16, 16), (0, 129)],
]


@pytest.mark.parametrize("sequences", MIXES)
def test_gluon_prefill_any_mix_of_chunks(sequences: list[tuple[int, int]]) -> None:
    check(a_batch(sequences))


@pytest.mark.parametrize("seed", range(4))
def test_gluon_prefill_any_order_of_warps_copies_and_gemms(seed: int) -> None:
    check(a_batch([(700, 40)], kv_heads=1), seed=seed)


@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
def test_gluon_prefill_every_block_size_and_box_end(block_size: int) -> None:
    check(a_batch([(130, 70), (300, 33), (0, 129)], block_size=block_size, kv_heads=1))


@pytest.mark.parametrize("size", [128, 256])
def test_gluon_prefill_every_head_size(size: int) -> None:
    check(a_batch([(300, 40), (0, 70)], size=size, kv_heads=1), scale=size**-0.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (7, 1), (16, 1), (8, 8)])
def test_gluon_prefill_query_heads_share_kv_head(heads: int, kv_heads: int) -> None:
    check(a_batch([(70, 130)], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("window", [1, 5, 64, 128, 300, 1000])
def test_gluon_prefill_window_hides_older_keys(window: int) -> None:
    check(a_batch([(600, 70), (2, 65), (0, 90)], kv_heads=1), window=window)


@pytest.mark.parametrize("window", [None, 30])
def test_gluon_prefill_sinks_add_to_softmax_denominator(window: int | None) -> None:
    check(a_batch([(150, 40), (0, 90)]), window=window, sinks=torch.tensor([-2.0, 0.0, 1.0, 9.0]))


def test_gluon_prefill_bfloat16_and_scales() -> None:
    check(a_batch([(150, 40), (0, 90)], dtype=torch.bfloat16), key_scale=0.5, value_scale=2.0)


FAULTS = {
    "a buffer is released after one group has read it": ("mbarrier.init(key_empty.index(stage), count=2)", "count=1"),
    "values too": ("mbarrier.init(value_empty.index(stage), count=2)", "count=1"),
    "a tile is read before its copy has completed": (
        "mbarrier.wait(key_full.index(stage), (done // STAGES) & 1)",
        "pass",
    ),
    "values are read before their copy has completed": ("mbarrier.wait(value_full.index(before),", "print("),
    "values are overwritten": ("mbarrier.wait(value_empty.index(stage), free)", "pass"),
    "the phase is wrong": ("free = ((done // STAGES) & 1) ^ 1", "free = (done // STAGES) & 1"),
    "both wait for their turn": ("mbarrier.wait(turns.index(ME), 1 - ME)", "mbarrier.wait(turns.index(ME), 0)"),
    "the barrier for read values is never signalled": ("mbarrier.arrive(value_empty.index(before), count=1)", "pass"),
    "queries are not fenced": ("hopper.fence_async_shared()\n        partition_barrier()", "partition_barrier()"),
    "boxes stay where they are": ("start % BLOCK_SIZE + real - BOX_ROWS", "start % BLOCK_SIZE"),
    "the end is not where the box has it": ("positions - moved, nowhere", "positions, nowhere"),
    "a tile too few is masked": ("(first_position + 1) // KEYS, 1)", "(first_position + KEYS) // KEYS, 1)"),
    "earlier sums do not shrink": (
        "sums = sums * gl.convert_layout(decay",
        "sums = sums + 0 * gl.convert_layout(decay",
    ),
}
"""Replacements in the kernel's source that must fail."""


@pytest.mark.cpu
@pytest.mark.parametrize("fault", FAULTS)
def test_stand_in_detects_fault(fault: str, tmp_path: Path) -> None:
    was, becomes = FAULTS[fault]
    source = Path(gluon_module.__file__).read_text()
    assert was in source, "the kernel has changed: change the fault with it"
    if becomes.startswith("count="):
        becomes = was.replace("count=2", becomes)
    (tmp_path / "faulty.py").write_text(source.replace(was, becomes))
    spec = importlib.util.spec_from_file_location("faulty", tmp_path / "faulty.py")
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    with pytest.raises((GluonError, AssertionError)):
        _compare_in_many_orders(faulty)


def _compare_in_many_orders(module: ModuleType) -> None:
    batch = a_batch([(750, 40)], kv_heads=1, size=128)
    expected = paged_prefill_reference(*batch, scale=0.25)
    for seed in range(8):
        torch.testing.assert_close(as_python(*batch, seed=seed, module=module), expected, rtol=0.02, atol=0.02)


@pytest.mark.cpu
def test_gluon_prefill_support_by_device_and_shapes() -> None:
    query, keys = torch.empty(4, 32, 128, dtype=torch.bfloat16), torch.empty(2, 16, 8, 128, dtype=torch.bfloat16)
    assert is_supported(query, keys, max_query_len=17, facts=H200)
    assert not is_supported(query, keys, max_query_len=16, facts=H200), "64 rows: one group has them all"
    assert not is_supported(query, keys, max_query_len=8192, facts=A100)
    assert not is_supported(query, keys, max_query_len=8192, soft_cap=50.0, facts=H200)
    assert not is_supported(query, keys, max_query_len=8192, chunk_size=64, facts=H200)
    assert not is_supported(query.float(), keys.float(), max_query_len=8192, facts=H200)
    assert not is_supported(query, keys.to(torch.float8_e4m3fn), max_query_len=8192, facts=H200)
    assert not is_supported(query, keys.view(4, 8, 8, 128), max_query_len=8192, facts=H200)
    assert not is_supported(query[..., :96], keys[..., :96], max_query_len=8192, facts=H200)


@pytest.mark.cpu
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_gluon_prefill_tiles_fit_shared_memory(size: int) -> None:
    config = gluon_prefill_config(size)
    assert (2 * config.stages * config.keys + ROWS) * size * 2 + 1024 <= H200.shared_bytes


def _launched(chosen: KernelBackends) -> list[str]:
    """Return the kernels of a step with chunks of 100 tokens, and of warm-up, on tensors without memory."""
    like = {"dtype": torch.bfloat16, "device": "meta"}
    query, cache = torch.empty(100, 32, 128, **like), torch.empty(64, 16, 8, 128, **like)  # type: ignore[call-overload]
    tables, lengths, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in ((1, 8), (1,), (2,)))
    with override_backends(chosen), record_launches() as launches:
        attend_paged_batch(query, cache, cache, PagedBatch(100, 0, tables, lengths, starts, 100), 0.1)
        warm_up_attention(query[:1], cache, cache)
    return [launch.kernel.name for launch in launches]


@pytest.mark.cpu
def test_step_uses_gluon_if_enabled_and_warm_up_compiles_both() -> None:
    assert "_paged_prefill_gluon" not in _launched(KernelBackends())
    requested = _launched(KernelBackends(gluon_prefill=True))
    assert requested[0] == "_paged_prefill_gluon"
    assert {"_paged_prefill_gluon", "_paged_prefill"} <= set(requested[1:]), "short chunks are left to the other"
