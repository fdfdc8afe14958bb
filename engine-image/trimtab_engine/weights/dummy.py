"""Random weights generated from config.json: for benchmarks and for testing a layout without a checkpoint."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_engine.model_files.json_files import CONFIG_FILE, GENERATION_FILE, read_json
from trimtab_engine.weights.source import Span

if TYPE_CHECKING:
    import torch

STANDARD_DEVIATION = 0.02  # transformers' initializer_range: activations keep a sane size


class DummySource:
    """Source of random tensors, each seeded by its name, so that the order of reads does not matter."""

    format = "dummy"

    def __init__(self, path: Path, seed: int) -> None:
        folder = path if path.is_dir() else path.parent
        self.config: Mapping[str, Any] = read_json(folder / CONFIG_FILE)
        self.generation_config: Mapping[str, Any] = read_json(folder / GENERATION_FILE, required=False)
        self.where = str(folder / CONFIG_FILE)
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.device = "cpu"
        """Device that generates them: a GPU generates billions per second, with other values than the CPU."""

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Say which tensors there shall be; the model knows."""
        self._shapes = shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors passed to `expect`."""
        return self._shapes

    def map_files(self) -> None:
        """There are none."""

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """float32; norm weights are 1, biases 0, the rest normally distributed. A part is that part of the whole."""
        whole = self._whole(name)
        if rows is not None:
            whole = whole[rows[0] : rows[1]]
        return whole if columns is None else whole[:, columns[0] : columns[1]]

    def _whole(self, name: str) -> "torch.Tensor":
        import torch

        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.empty(shape, device=self.device).normal_(0.0, STANDARD_DEVIATION, generator=generator)
