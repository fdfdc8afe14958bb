"""Registry of the adapters that a core serves: names and slots."""

import logging
from collections.abc import Callable, Iterable

from trimtab_engine.config.adapters import AdapterConfig, check_name
from trimtab_engine.errors import ConfigError, InvalidRequest
from trimtab_engine.messages.admin import AdapterCard
from trimtab_engine.runner.adapters import LoadedAdapter
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.adapter import Adapter

logger = logging.getLogger("trimtab_engine.core")


class AdapterRegistry:
    """Adapters available to new requests. An unloaded adapter keeps its slot while requests use it."""

    def __init__(self, config: AdapterConfig | None, runner: ModelRunner, in_use: Callable[[], set[Adapter]]) -> None:
        """Load the configured adapters. `in_use` returns the adapters of unfinished requests."""
        self._config, self._runner, self._in_use = config, runner, in_use
        self.max_loras = None if config is None else config.max_loras
        """Maximum number of different adapters in a step. None if adapters are not served."""
        parents = {} if config is None else {module.name: module.base_model_name for module in config.modules}
        self._parents: dict[str, str | None] = parents
        self._served = {loaded.adapter.name: loaded for loaded in runner.adapters}
        self.cards: tuple[AdapterCard, ...] = ()
        """Adapter descriptions for the API servers."""
        self._tell()

    def of(self, name: str) -> Adapter | None:
        """Return the adapter of this name; None for an empty name.

        Raises:
            InvalidRequest: If the adapter is not loaded.
        """
        if not name:
            return None
        loaded = self._served.get(name)
        if loaded is None:
            raise InvalidRequest(f"the adapter {name} is not loaded; it was unloaded meanwhile")
        return loaded.adapter

    def load(self, name: str, folder: str) -> None:
        """Serve another adapter from now on. No step is in flight. After an error nothing has changed.

        Raises:
            ConfigError: The adapter cannot be served.
        """
        if self._config is None or not self._config.is_updatable:
            raise ConfigError("adapters are loaded at the start only; start with --allow-runtime-lora-updating")
        check_name(name)
        if name in self._served:
            raise ConfigError(f"the adapter {name} is loaded already; unload it first, or give this one another name")
        slot = self._free_slot()
        try:
            digest = self._runner.load_adapter(slot, name, folder)
        except Exception:
            self._runner.forget_adapter(slot)
            raise
        self._served[name] = LoadedAdapter(Adapter(name, slot, digest), folder)
        self._tell()

    def unload(self, name: str) -> None:
        """Make the adapter unavailable to new requests; current ones continue.

        Raises:
            ConfigError: If the adapter is not loaded.
        """
        if name not in self._served:
            raise ConfigError(f"the adapter {name[:100]} is not loaded; loaded are {_listed(self._served)}")
        del self._served[name]
        self._parents.pop(name, None)
        self._tell()
        logger.info("adapter %s: unloaded", name)
        self.sweep()

    def drop_lost(self) -> list[Adapter]:
        """Stop serving adapters that the runner no longer has. Return them."""
        slots = {loaded.adapter.slot for loaded in self._runner.adapters}
        lost = [loaded.adapter for loaded in self._served.values() if loaded.adapter.slot not in slots]
        for adapter in lost:
            del self._served[adapter.name]
            self._parents.pop(adapter.name, None)
        if lost:
            self._tell()
        return lost

    def sweep(self) -> None:
        """Forget unloaded adapters that no request uses, so that reloading weights skips them."""
        kept = self._taken()
        for slot in [loaded.adapter.slot for loaded in self._runner.adapters if loaded.adapter.slot not in kept]:
            self._runner.forget_adapter(slot)

    def _tell(self) -> None:
        served = self._served.items()
        self.cards = tuple(AdapterCard(name, each.folder, self._parents.get(name)) for name, each in served)

    def _taken(self) -> set[int]:
        served = {loaded.adapter.slot for loaded in self._served.values()}
        return served | {adapter.slot for adapter in self._in_use()}

    def _free_slot(self) -> int:
        assert self._config is not None
        taken = self._taken()
        free = next((slot for slot in range(self._config.capacity) if slot not in taken), None)
        if free is None and len(self._served) < self._config.capacity:
            raise ConfigError(
                f"all {self._config.capacity} places are taken (--max-cpu-loras): requests still use an adapter that "
                f"was unloaded; try again when they have ended"
            )
        if free is None:
            raise ConfigError(
                f"all {self._config.capacity} places are taken (--max-cpu-loras) by {_listed(self._served)}; unload one"
            )
        return free


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
