"""Division of images over ranks by cost; device conversion of pixels equals the host's."""

from typing import Any

import pytest
import tiled_model
import torch
import vision_model
from fake_device import CUDA, NoWaiting, a_fake_device, variants
from tiled_model import a_tile
from trimtab_engine.models.family import VisionEncoder
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import parse_model_config, vision_encoder_of
from trimtab_engine.multimodal.items import MultiModalItem
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.runner.item_encoder import ItemEncoder, convert_patches, shares
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs
from trimtab_engine.weights.source import Span
from trimtab_kernels.launch import jit
from trimtab_kernels.launch.jit import record_launches
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.registry import language_model_config
from vision_model import an_item


@pytest.mark.parametrize(
    ("costs", "num_ranks", "owners"),
    [
        ([], 2, []),
        ([4, 4], 2, [0, 1]),
        ([1, 9, 4, 4], 2, [1, 0, 1, 1]),  # 9 on one rank, the others on the other
        ([2, 3, 5], 4, [2, 1, 0]),  # one rank has nothing
        ([7, 7, 7], 1, [0, 0, 0]),
    ],
)
def test_costliest_items_are_assigned_first_to_least_loaded_rank(
    costs: list[int], num_ranks: int, owners: list[int]
) -> None:
    assert shares(costs, num_ranks) == owners


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_lookup_equals_host_computation(dtype: torch.dtype) -> None:
    patches = an_item((1, 4, 6)).patches
    assert patches is not None
    made = convert_patches(patches, torch.device("cpu"), dtype)
    assert torch.equal(made, torch.from_numpy(as_float32(patches)).to(dtype))


class ShapesAlone:
    """A tower's weights on a device that is not there."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        shape = list(self._shapes[name])
        for dimension, span in enumerate((rows, columns)):
            if span is not None:
                shape[dimension] = span[1] - span[0]
        return torch.empty(shape, device=CUDA)


def a_tower(said: dict[str, Any], architecture: str) -> VisionEncoder:
    """Inside a_fake_device()."""
    config = {**said, "architectures": [architecture]}
    text = parse_model_config(config, {}, "config.json")
    kind = vision_encoder_of(text)
    assert kind is not None
    vision = kind.parse(ConfigReader(language_model_config(config), {}, "config.json"), text)
    source: Any = ShapesAlone({name: tensor.shape for name, tensor in kind.tensors(vision).items()})
    with NoWaiting(is_start_up=True):
        return kind.build(vision, Loader(source, torch.bfloat16, CUDA, lambda count: None), None)


QWEN, LLAMA4 = "Qwen2_5_VLForConditionalGeneration", "Llama4ForConditionalGeneration"


@pytest.mark.skipif(not jit.HAS_TRITON, reason="records launches of Triton kernels")
@pytest.mark.parametrize(
    ("said", "architecture", "items"),
    [
        pytest.param(vision_model.CONFIG, QWEN, [an_item((1, 4, 6)), an_item((1, 10, 8)), an_item((3, 2, 4))], id=QWEN),
        pytest.param(tiled_model.CONFIG, LLAMA4, [a_tile(1), a_tile(2)], id=LLAMA4),
    ],
)
def test_vision_encoder_on_cuda_never_waits_or_compiles(
    said: dict[str, Any], architecture: str, items: list[MultiModalItem]
) -> None:
    inputs = StepInputs([5] * 9, list(range(9)), [], [GroupInputs([], [([1], 0, 9)])])
    inputs.missing = [(item.content_hash, item) for item in items]
    inputs.placed = [(1, 2, items[0].content_hash, 1), (4, 1, items[1].content_hash, 0)]
    with a_fake_device():
        tower, encoder = a_tower(said, architecture), ItemEncoder(CUDA)
        with record_launches() as at_start, NoWaiting():
            encoder.warm_up(tower, 64)
        with record_launches() as served, NoWaiting():
            placed = encoder.place(inputs, tower)
    assert placed is not None
    index, rows = placed
    assert (index.shape, rows.shape, rows.dtype) == ((3,), (3, 32), torch.bfloat16)
    assert index.is_cuda
    assert rows.is_cuda
    assert variants(served) <= variants(at_start)
    assert bool(served) == (architecture == QWEN), "the other has torch's norms alone"
