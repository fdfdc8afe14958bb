"""Loading of weights: data read for one projection is never mixed with another's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.layers.linear import Linear
from trimtab_engine.layers.vocabulary import LmHead, VocabularyEmbedding
from trimtab_engine.models.loading import Loader
from trimtab_engine.weights.safetensors_files import SafetensorsSource
from trimtab_kernels.rotary_embedding import interleave_pairs

HIDDEN, OUT = 24, 8
STORED = (torch.bfloat16, torch.float32)


def a_loader(folder: Path, stored: torch.dtype, computed: torch.dtype) -> tuple[Loader, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    names = [f"{layer}.{name}.weight" for layer in range(3) for name in ("a", "b", "c")]
    tensors = {name: torch.randn(OUT, HIDDEN, generator=generator).to(stored) for name in names}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    source = SafetensorsSource(folder)
    return Loader(source, computed, torch.device("cpu"), lambda count: None), tensors


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("computed", STORED)
def test_products_that_are_read_one_after_the_other_keep_their_own_weights(
    stored: torch.dtype, computed: torch.dtype, tmp_path: Path
) -> None:
    """They are converted and joined in the same memory."""
    load, tensors = a_loader(tmp_path, stored, computed)
    parts = {"a": (0, OUT), "b": (2, 6)}
    joined = [load.joined(f"{layer}.", parts) for layer in range(3)]
    single = [load.part_of_sum(f"{layer}.c", (3, 19)) for layer in range(3)]
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(computed)
    tolerance = 1e-5 if computed == torch.float32 else 0.05
    for layer in range(3):
        weight = torch.cat([tensors[f"{layer}.a.weight"], tensors[f"{layer}.b.weight"][2:6]]).to(computed)
        torch.testing.assert_close(joined[layer](x), x @ weight.t(), rtol=tolerance, atol=tolerance)
        weight = tensors[f"{layer}.c.weight"][:, 3:19].to(computed)
        torch.testing.assert_close(single[layer](x[:, 3:19]), x[:, 3:19] @ weight.t(), rtol=tolerance, atol=tolerance)


def test_a_single_row_is_its_own_memory(tmp_path: Path) -> None:
    load, tensors = a_loader(tmp_path, torch.bfloat16, torch.float16)
    first, second = (load.joined(f"{layer}.", {"a": (0, 1)}) for layer in (0, 1))
    x = torch.ones(1, HIDDEN, dtype=torch.float16)
    for layer, product in enumerate((first, second)):
        expected = tensors[f"{layer}.a.weight"][:1].half().float().sum()
        assert float(product(x)) == pytest.approx(float(expected), abs=0.05)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_padded_vocabulary_table_is_used_as_stored(stored: torch.dtype, tmp_path: Path) -> None:
    load, tensors = a_loader(tmp_path, stored, torch.float32)
    table, expected = load.vocabulary("0.a.weight", rows=None), tensors["0.a.weight"].float()
    index = torch.tensor([3, 0, 3, 7])
    assert torch.equal(VocabularyEmbedding(table, 0, None)(index), expected[index])
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = LmHead(table, OUT, None)(x)
    assert logits is not None
    torch.testing.assert_close(logits, x @ expected.t(), rtol=1e-5, atol=1e-5)


def test_rows_in_pairs_are_packed_like_rows_that_were_put_in_order_before(tmp_path: Path) -> None:
    load, tensors = a_loader(tmp_path, torch.bfloat16, torch.float32)
    product = load.joined("0.", {"a": (0, OUT), "b": (0, OUT), "c": (0, OUT)}, pairs=4)
    weights = [tensors[f"0.{name}.weight"].float() for name in "abc"]
    whole = torch.cat([*(interleave_pairs(weight, 4) for weight in weights[:2]), weights[2]])
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(x), Linear(whole)(x))
