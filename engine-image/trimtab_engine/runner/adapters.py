"""Adapter slots of a rank: adapted projections, memory for the loadable adapters, and their factors.

Adapters served from the start take the memory that they need; on devices whose kernels read slots, all take as much as
the one of highest rank in every projection that any of them adapts. If clients may load adapters, memory for the
maximum number at maximum rank in every projection is allocated with the weights, so that later loads take no more
device memory.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from trimtab_modelspec.tensors import Tensors

from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.errors import ConfigError, ModelError, NotSupportedError
from trimtab_engine.layers.adapted import AdaptedLinear, AdaptedPart, AdapterRows, Factors, StackedAdaptedLinear
from trimtab_engine.layers.linear import Linear
from trimtab_engine.layers.quantized import BlockFp8Linear, Projection
from trimtab_engine.models.adapter_fit import check_fit
from trimtab_engine.parallel.shard import ModelShard
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.weights.adapter_files import PeftAdapter

logger = logging.getLogger("trimtab_engine.core")


def reads_slots(device: torch.device) -> bool:
    """Return True if kernels on this device read an adapter slot per row."""
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a slot, and the folder it was read from."""

    adapter: Adapter
    folder: str


class AdapterSlots:
    """The adapters of one rank. The core replaces a slot's content only when no request uses it."""

    def __init__(
        self, config: AdapterConfig, tensors: Tensors, shard: ModelShard, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate slots. `tensors` are those of the whole model; `shard` selects this rank's part."""
        self._is_stacked = reads_slots(device)
        self.rows = AdapterRows(device if self._is_stacked else None)
        self._config, self._tensors, self._shard = config, tensors, shard
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._projections: list[AdaptedLinear] = []
        self._loaded: dict[int, LoadedAdapter] = {}
        self._was_open = False

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The loaded adapters in slot order."""
        return [self._loaded[slot] for slot in sorted(self._loaded)]

    # --- as the model loads -----------------------------------------------------------------------------------------

    def take(
        self, projection: Linear | BlockFp8Linear, parts: Sequence[AdaptedPart], num_rows: Sequence[int]
    ) -> Projection:
        """See Adapting."""
        make = StackedAdaptedLinear if self._is_stacked else AdaptedLinear
        adapted = make(projection, parts, self.rows, num_rows)
        self._projections.append(adapted)
        return adapted

    def open(self, model: str) -> None:
        """Allocate memory for adapters of the loaded projections, and read the configured adapters or those loaded
        before.
        """
        if not self._projections:
            raise NotSupportedError(
                f"--enable-lora is not supported for {model}: none of its products has room for adapters"
            )
        if self._was_open:
            self._reopen()
            return
        modules = self._config.modules
        self._allocate_slots([module.folder for module in modules])
        for slot, module in enumerate(modules):
            self.load(slot, module.name, module.folder)
        self._was_open = True

    def _reopen(self) -> None:
        """Read the loaded adapters again. Unreadable and changed adapters are dropped: requests that need
        them end, others go on.
        """
        for slot, each in list(self._loaded.items()):
            try:
                self._check_unchanged(each)
            except (ConfigError, OSError) as error:
                logger.error("adapter %s: dropped: %s", each.adapter.name, error)
                del self._loaded[slot]
        self._allocate_slots([each.folder for each in self._loaded.values()])
        for slot, each in list(self._loaded.items()):
            self.load(slot, each.adapter.name, each.folder)

    def _check_unchanged(self, loaded: LoadedAdapter) -> None:
        if PeftAdapter(Path(loaded.folder)).digest != loaded.adapter.digest:
            raise ModelError(f"{loaded.folder}: has other files than when it was loaded; load it again")

    def _allocate_slots(self, folders: Sequence[str]) -> None:
        """Allocate memory before adapters are read: for client-loaded adapters, and for kernels.

        Raises:
            ConfigError: If an adapter cannot be served.
        """
        if self._config.is_updatable:
            for projection in self._projections:
                _allocate_slots(projection, self._config.capacity, self._config.max_lora_rank, self._like)
        elif self._is_stacked and folders:
            opened = [PeftAdapter(Path(folder)) for folder in folders]
            adapted = {module for each in opened for module in each.modules}
            rank = min(max(each.max_rank for each in opened), self._config.max_lora_rank)  # more is refused
            for projection in self._projections:
                if any(part.name in adapted for part in projection.parts):
                    _allocate_slots(projection, len(folders), rank, self._like)

    def close(self) -> None:
        """Release the weights; open() reads loaded adapters again."""
        self._projections.clear()

    # --- while it serves --------------------------------------------------------------------------------------------

    def load(self, slot: int, name: str, folder: str) -> bytes:
        """Read an adapter into a slot. Returns the digest of its files. Raises ConfigError, and then the slot is as it
        was.
        """
        opened = PeftAdapter(Path(folder))
        check_fit(name, opened, self._tensors, self._config.max_lora_rank)
        own = self._own_modules(name, opened)
        factors = {module: self._factors(opened, module) for module in own}
        for projection in self._projections:
            makes_room = not (self._config.is_updatable or self._is_stacked)
            if makes_room and any(part.name in own for part in projection.parts):
                rank = max(factors[part.name].down.shape[0] for part in projection.parts if part.name in own)
                projection.reserve_slot(slot, rank, self._like)
            projection.fill(slot, factors)
        self._loaded[slot] = LoadedAdapter(Adapter(name, slot, opened.digest), folder)
        logger.info(
            "adapter %s: %d modules of rank up to %d, %s", name, len(opened.modules), opened.max_rank, opened.where
        )
        return opened.digest

    def forget(self, slot: int) -> None:
        """Mark the slot as unused: its adapter is not read again with the weights."""
        self._loaded.pop(slot, None)

    def _own_modules(self, name: str, adapter: PeftAdapter) -> list[str]:
        """Return the adapted modules of this rank.

        Raises:
            NotSupportedError: If a layer does not support adapters.
        """
        adapted = {part.name for projection in self._projections for part in projection.parts}
        first, last = self._shard.layers
        layers = tuple(f"model.layers.{layer}." for layer in range(first, last))
        missing = next((m for m in adapter.modules if m.startswith(layers) and m not in adapted), None)
        if missing is not None:
            raise NotSupportedError(
                f"adapter {name} ({adapter.where}): it adapts {missing}, and adapters of that projection are not "
                f"built; merge it into the model, or train one of the others"
            )
        return [module for module in adapter.modules if module in adapted]

    def _factors(self, adapter: PeftAdapter, module: str) -> Factors:
        """Return the factors in the computing dtype, with the scale multiplied in before rounding."""
        down, up = adapter.factors(module)
        up = up.float() * adapter.modules[module].scale
        return Factors(down.to(self._like), up.to(self._like))

    def profiling_adapter(self) -> Adapter | None:
        """Return an adapter for profiling, used by every row of the largest step: the loaded one with the most
        parameters, or an empty slot if clients may load adapters. None if there is neither.
        """
        slots = {slot for projection in self._projections for slot in projection.sizes}
        sizes = {slot: sum(projection.sizes.get(slot, 0) for projection in self._projections) for slot in slots}
        return Adapter("", max(sizes, key=sizes.__getitem__), b"") if sizes else None


def _allocate_slots(projection: AdaptedLinear, num_slots: int, rank: int, like: torch.Tensor) -> None:
    if isinstance(projection, StackedAdaptedLinear):
        projection.reserve_slots(num_slots, rank, like)
        return
    for slot in range(num_slots):
        projection.reserve_slot(slot, rank, like)
