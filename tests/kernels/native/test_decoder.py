"""A compiled layer against plain torch: GEMMs, norms, rotation, cache, attention."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from trimtab_kernels.native.batch import build_native_batch
from trimtab_kernels.native.decoder import DecoderShape, LayerWeights, NativeDecoder, NativeStep, supports_head_size
from trimtab_kernels.native.library import NativeLibrary
from trimtab_kernels.native.matrix import pack_matrix
from trimtab_kernels.paged_attention import paged_attention_reference
from trimtab_kernels.rms_norm import rms_norm_reference
from trimtab_kernels.rotary_embedding import rotary_embedding_reference

EPS, SCALE = 1e-5, 0.3


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's plain weights."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None


def some_weights(shape: DecoderShape, *, is_qwen: bool) -> Weights:
    def normal(*sizes: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*sizes) / sizes[-1] ** 0.5
        return values

    heads, kv, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    return Weights(
        1 + 0.1 * torch.randn(shape.hidden_size),
        1 + 0.1 * torch.randn(shape.hidden_size),
        normal((heads + 2 * kv) * size, shape.hidden_size),
        torch.randn((heads + 2 * kv) * size) if is_qwen else None,
        normal(shape.hidden_size, heads * size),
        normal(2 * shape.intermediate_size, shape.hidden_size),
        normal(shape.hidden_size, shape.intermediate_size),
        (torch.rand(size) + 0.5, torch.rand(size) + 0.5) if is_qwen else None,
    )


def packed(library: NativeLibrary, w: Weights) -> LayerWeights:
    query_norm, key_norm = w.head_norms or (None, None)
    return LayerWeights(
        w.input_norm,
        w.post_norm,
        pack_matrix(library, w.qkv, w.qkv_bias),
        pack_matrix(library, w.output),
        query_norm,
        key_norm,
        pack_matrix(library, w.gate_up, is_gated=True),
        pack_matrix(library, w.down),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A step: sequences as (tokens before, tokens now), decodes first; block tables leave gaps in the cache."""

    shape: DecoderShape
    spans: list[tuple[int, int]]
    block_size: int

    @property
    def tables(self) -> list[list[int]]:
        counts = [-(-(before + now) // self.block_size) for before, now in self.spans]
        ids = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
        return [[ids.pop() for _ in range(count)] for count in counts]

    @property
    def slots(self) -> torch.Tensor:
        return torch.tensor(
            [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for table, (before, now) in zip(self.tables, self.spans, strict=True)
                for p in range(before, before + now)
            ]
        )

    def cache(self) -> torch.Tensor:
        num_blocks = sum(map(len, self.tables)) + 2
        return torch.randn(num_blocks, self.block_size, self.shape.num_kv_heads, self.shape.head_size)


def layer_reference(
    w: Weights, case: Case, hidden: torch.Tensor, rotation: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of the attention half and of the MLP half."""
    shape = case.shape
    heads, kv, size, rows = shape.num_heads, shape.num_kv_heads, shape.head_size, hidden.shape[0]
    qkv = F.linear(rms_norm_reference(hidden, w.input_norm, EPS), w.qkv, w.qkv_bias).view(rows, -1, size)
    query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
    if w.head_norms is not None:
        query, key = (rms_norm_reference(x, n, EPS) for x, n in zip((query, key), w.head_norms, strict=True))
    query, key = rotary_embedding_reference(query, rotation), rotary_embedding_reference(key, rotation)
    keys.flatten(0, 1)[case.slots], values.flatten(0, 1)[case.slots] = key, value
    parts, row = [], 0
    for table, (before, now) in zip(case.tables, case.spans, strict=True):
        parts.append(paged_attention_reference(query[row : row + now], keys, values, table, before, SCALE))
        row += now
    attention = F.linear(torch.cat(parts).flatten(1), w.output)
    gate, up = F.linear(rms_norm_reference(hidden + attention, w.post_norm, EPS), w.gate_up).chunk(2, dim=1)
    return attention, F.linear(F.silu(gate) * up, w.down)


def a_case(spans: list[tuple[int, int]], heads: tuple[int, int, int] = (4, 2, 16), block_size: int = 4) -> Case:
    return Case(DecoderShape(48, heads[0], heads[1], heads[2], 40, EPS, SCALE), spans, block_size)


def check_layers(library: NativeLibrary, case: Case, *, is_qwen: bool = False, num_layers: int = 2) -> None:
    torch.manual_seed(0)
    weights = [some_weights(case.shape, is_qwen=is_qwen) for _ in range(num_layers)]
    rows = sum(now for _, now in case.spans)
    hidden, rotation = torch.randn(rows + 1, 48), torch.polar(torch.ones(rows, 1), torch.randn(rows, 1))
    rotation = rotation.repeat(1, case.shape.head_size // 2).contiguous()
    keys, values = [case.cache() for _ in weights], [case.cache() for _ in weights]
    expected, expected_keys, expected_values = hidden[:rows], [k.clone() for k in keys], [v.clone() for v in values]
    for w, k, v in zip(weights, expected_keys, expected_values, strict=True):
        attention, mlp = layer_reference(w, case, expected, rotation, k, v)
        expected = expected + attention + mlp
    decoder = NativeDecoder(library, case.shape, [packed(library, w) for w in weights])
    chunks = [(table, before, now) for table, (before, now) in zip(case.tables, case.spans, strict=True)]
    batch = build_native_batch([], chunks, block_size=case.block_size)
    padding = hidden[rows].clone()
    decoder.run(NativeStep(decoder, hidden, rotation, (keys, values), case.slots, batch))
    torch.testing.assert_close(hidden[:rows], expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(hidden[rows], padding)  # rows after the last token are unused
    torch.testing.assert_close(keys, expected_keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1, 2), (4, 4, 16), (9, 3, 64), (6, 1, 10), (14, 2, 80), (3, 1, 256)])
@pytest.mark.parametrize("is_qwen", [True, False])
def test_decoder_heads_of_every_number_and_size(
    library: NativeLibrary, heads: tuple[int, int, int], is_qwen: bool
) -> None:
    check_layers(library, a_case([(0, 1), (6, 1), (5, 7), (0, 13)], heads), is_qwen=is_qwen)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("spans", [[(300, 1)], [(127, 1), (128, 1), (4, 1)], [(0, 1)] * 33, [(700, 3)], [(130, 2)]])
def test_decoder_decodes_and_drafts_of_any_context(
    library: NativeLibrary, spans: list[tuple[int, int]], block_size: int
) -> None:
    check_layers(library, a_case(spans, block_size=block_size))


@pytest.mark.parametrize("spans", [[(0, 61)], [(0, 300)], [(150, 250)], [(9, 1), (0, 238), (40, 5), (0, 260), (3, 70)]])
def test_decoder_chunks_longer_than_units_tiles_and_slices(
    library: NativeLibrary, spans: list[tuple[int, int]]
) -> None:
    check_layers(library, a_case(spans, block_size=16))


@pytest.mark.parametrize("spans", [[(30, 1)], [(20, 1), (150, 1), (0, 30)], [(9, 1), (0, 300)]])
def test_decoder_threads_that_are_late_change_nothing(library: NativeLibrary, spans: list[tuple[int, int]]) -> None:
    """Eight threads on fewer cores are interrupted in the middle of units, which other threads then repeat."""
    case = a_case(spans, (4, 2, 16), 16)
    torch.manual_seed(0)
    decoder = NativeDecoder(library, case.shape, [packed(library, some_weights(case.shape, is_qwen=True))] * 40)
    rows = sum(now for _, now in spans)
    hidden, rotation = torch.randn(rows, 48), torch.polar(torch.ones(rows, 8), torch.randn(rows, 8))
    batch = build_native_batch(
        [], [(table, *span) for table, span in zip(case.tables, spans, strict=True)], block_size=16
    )
    caches = [case.cache()] * 40, [case.cache()] * 40
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, *[8] * 20):
            torch.set_num_threads(threads)
            keys, values = ([each[0].clone()] * 40 for each in caches)
            x = hidden.clone()
            decoder.run(NativeStep(decoder, x, rotation, (keys, values), case.slots, batch))
            results.append((x, keys[0], values[0]))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_decoder_large_scores_do_not_overflow_or_vanish(library: NativeLibrary) -> None:
    case = a_case([(200, 1), (140, 9)], (2, 1, 8))
    steep = Case(DecoderShape(48, 2, 1, 8, 40, EPS, 40.0), case.spans, case.block_size)
    decoder, step, w, hidden, rotation, caches = one_layer(library, steep)
    keys, values = (c.clone() for c in caches)
    parts = decoder.attention(step, 0, adds=False)
    rows = [paged_rows(steep, w, hidden, rotation, keys, values)]
    torch.testing.assert_close(parts, rows[0], rtol=1e-3, atol=1e-3)


def paged_rows(
    case: Case, w: Weights, hidden: torch.Tensor, rotation: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return the attention half's result with the case's own scale."""
    heads, kv, size = case.shape.num_heads, case.shape.num_kv_heads, case.shape.head_size
    qkv = F.linear(rms_norm_reference(hidden, w.input_norm, EPS), w.qkv).view(hidden.shape[0], -1, size)
    query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
    query, key = rotary_embedding_reference(query, rotation), rotary_embedding_reference(key, rotation)
    keys.flatten(0, 1)[case.slots], values.flatten(0, 1)[case.slots] = key, value
    parts, row = [], 0
    for table, (before, now) in zip(case.tables, case.spans, strict=True):
        parts.append(paged_attention_reference(query[row : row + now], keys, values, table, before, case.shape.scale))
        row += now
    return F.linear(torch.cat(parts).flatten(1), w.output)


Layer = tuple[NativeDecoder, NativeStep, Weights, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def one_layer(library: NativeLibrary, case: Case) -> Layer:
    torch.manual_seed(0)
    w = some_weights(case.shape, is_qwen=False)
    rows = sum(now for _, now in case.spans)
    hidden = torch.randn(rows, 48)
    rotation = torch.polar(torch.ones(rows, case.shape.head_size // 2), torch.randn(rows, case.shape.head_size // 2))
    caches = case.cache(), case.cache()
    decoder = NativeDecoder(library, case.shape, [packed(library, w)])
    chunks = [(table, before, now) for table, (before, now) in zip(case.tables, case.spans, strict=True)]
    batch = build_native_batch([], chunks, block_size=case.block_size)
    step = NativeStep(decoder, hidden, rotation, ([caches[0]], [caches[1]]), case.slots, batch)
    return decoder, step, w, hidden, rotation, caches


def test_decoder_halves_return_partial_results(library: NativeLibrary) -> None:
    case = a_case([(5, 1), (3, 4)])
    decoder, step, w, hidden, rotation, caches = one_layer(library, case)
    before = hidden.clone()
    attention, mlp = layer_reference(w, case, before, rotation, *(c.clone() for c in caches))
    partial = decoder.attention(step, 0, adds=False)
    assert torch.equal(hidden, before)
    assert partial is not None
    torch.testing.assert_close(partial, attention, rtol=2e-5, atol=2e-5)
    hidden.add_(partial)
    assert decoder.mlp(step, 0, adds=True) is None
    torch.testing.assert_close(hidden, before + attention + mlp, rtol=2e-5, atol=2e-5)


def test_decoder_without_layers_or_tokens_changes_nothing(library: NativeLibrary) -> None:
    decoder, step, _, hidden, _, _ = one_layer(library, a_case([(5, 1)]))
    before = hidden.clone()
    decoder.run(step, num_layers=0)
    assert torch.equal(hidden, before)
    _, nothing, _, _, _, _ = one_layer(library, a_case([]))
    decoder.run(nothing)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hidden", lambda x: x.double()),
        ("hidden", lambda x: x[:, :40]),
        ("hidden", lambda x: x.t().contiguous().t()),
        ("hidden", lambda x: x[:3]),
        ("rotation", lambda x: x[:, :4]),
        ("rotation", lambda x: x.to(torch.complex128)),
        ("cache", lambda x: x.double()),
        ("cache", lambda x: x[:, :3]),
    ],
)
def test_decoder_rejects_mismatched_inputs(library: NativeLibrary, name: str, change: object) -> None:
    assert callable(change)
    case = a_case([(5, 1), (3, 4)])
    decoder, _, _, hidden, rotation, (keys, values) = one_layer(library, case)
    batch = build_native_batch([], [([0, 1], 5, 1), ([2, 3], 3, 4)], block_size=case.block_size)
    given = {"hidden": hidden, "rotation": rotation, "cache": keys}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match="compiled layers"):
        NativeStep(decoder, given["hidden"], given["rotation"], ([given["cache"]], [values]), case.slots, batch)


def test_supports_head_size_by_parity_and_maximum() -> None:
    assert [supports_head_size(size) for size in (2, 63, 64, 256, 258)] == [True, False, True, True, False]


def test_native_batch_lists_decodes_before_chunks() -> None:
    batch = build_native_batch([([7, 8, 9], 5)], [([4, 3], 2, 3), ([5], 0, 2)], block_size=4)
    assert batch.sequences.tolist() == [[0, 1, 4, 0], [1, 3, 2, 2], [4, 2, 0, 4]]
    assert batch.tables.tolist() == [7, 8, 4, 3, 5]
