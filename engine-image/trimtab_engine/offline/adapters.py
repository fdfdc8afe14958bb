"""Adapters of the offline LLM class: a call names its adapters, which are loaded at first use, as in vLLM. The least
recently used ones are evicted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages.admin import LoadLora, UnloadLora

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """vLLM's LoRARequest: the adapter of some prompts. `lora_int_id` is ignored, because names identify adapters.
    Without a path it must be loaded already.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


AdapterRequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts of a call, or one per prompt."""


class OfflineAdapters:
    """Loaded adapters of an in-process engine. No request runs while they change."""

    def __init__(self, engine: "Engine", config: AdapterConfig | None) -> None:
        self._engine, self._config = engine, config
        modules = () if config is None else config.modules
        self._folders = {module.name: module.folder for module in modules}
        """Loaded adapters by name, least recently used first."""

    def names_of(self, wanted: AdapterRequests, count: int) -> list[str]:
        """Return the adapter name of each prompt after loading all of them; empty for none. Raises InvalidRequest."""
        each = [wanted] * count if wanted is None or isinstance(wanted, LoRARequest) else list(wanted)
        if len(each) != count:
            raise InvalidRequest(f"lora_request: {len(each)} for {count} prompts; set one, or one per prompt")
        request = dict.fromkeys(one for one in each if one is not None)
        names = [one.lora_name for one in request]
        if request and self._config is None:
            raise InvalidRequest("lora_request requires an LLM created with enable_lora=True")
        if len(set(names)) < len(names):
            raise InvalidRequest("lora_request: two adapters have the same name; use unique names")
        if self._config is not None and len(names) > self._config.capacity:
            raise InvalidRequest(
                f"lora_request names {len(names)} adapters, but max_cpu_loras is {self._config.capacity}; raise it, or "
                f"use fewer adapters per call"
            )
        for one in request:
            self._load(one, names)
        return ["" if one is None else one.lora_name for one in each]

    def _load(self, request: LoRARequest, kept: Collection[str]) -> None:
        """Load an adapter. If necessary, evict the least recently used one that is not in `kept`."""
        assert self._config is not None
        folder = self._folders.pop(request.lora_name, None)
        if folder is None and not request.lora_path:
            raise InvalidRequest(f"the adapter {request.lora_name} is not loaded; set its lora_path")
        if folder is not None and request.lora_path in ("", folder):
            self._folders[request.lora_name] = folder
            return
        if folder is not None:
            self._engine.unload_adapter(UnloadLora(request.lora_name))
        elif len(self._folders) == self._config.capacity:
            oldest = next(name for name in self._folders if name not in kept)
            self._engine.unload_adapter(UnloadLora(oldest))
            del self._folders[oldest]
        status, body = self._engine.load_adapter(LoadLora(request.lora_name, request.lora_path))
        if status != 200:
            raise InvalidRequest(body["message"])
        self._folders[request.lora_name] = request.lora_path
