"""Adapters of the offline LLM class: a call names the ones that it wants, and they are loaded when they are first asked
for, as in vLLM. Those that were asked for longest ago make room."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages import LoadLora, UnloadLora

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """vLLM's: the adapter of some prompts. `lora_int_id` is not needed here: names tell adapters apart. Without a path
    it is one that is loaded already."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


Wanted = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts of a call, or one each."""


class OfflineAdapters:
    """Those that an engine in this process has. Nothing runs while they change."""

    def __init__(self, engine: "Engine", config: AdapterConfig | None) -> None:
        self._engine, self._config = engine, config
        modules = () if config is None else config.modules
        self._folders = {module.name: module.folder for module in modules}
        """By name, in the order in which they were asked for last."""

    def names_of(self, wanted: Wanted, count: int) -> list[str]:
        """The name for each of so many prompts, with all of them loaded; empty: none. Raises InvalidRequest."""
        each = [wanted] * count if wanted is None or isinstance(wanted, LoRARequest) else list(wanted)
        if len(each) != count:
            raise InvalidRequest(f"there are {count} prompts and {len(each)} lora_request; give one, or one each")
        asked = dict.fromkeys(one for one in each if one is not None)
        names = [one.lora_name for one in asked]
        if asked and self._config is None:
            raise InvalidRequest("lora_request needs an LLM that was made with enable_lora=True")
        if len(set(names)) < len(names):
            raise InvalidRequest("lora_request gives one name to two adapters; give each a name of its own")
        if self._config is not None and len(names) > self._config.capacity:
            raise InvalidRequest(
                f"lora_request names {len(names)} adapters, but max_cpu_loras is {self._config.capacity}; raise it, or "
                f"ask for fewer in a call"
            )
        for one in asked:
            self._load(one, names)
        return ["" if one is None else one.lora_name for one in each]

    def _load(self, asked: LoRARequest, kept: Collection[str]) -> None:
        """Have it loaded; who is not to be kept, and was asked for longest ago, makes room."""
        assert self._config is not None
        folder = self._folders.pop(asked.lora_name, None)
        if folder is None and not asked.lora_path:
            raise InvalidRequest(f"the adapter {asked.lora_name} is not loaded; give its lora_path")
        if folder is not None and asked.lora_path in ("", folder):
            self._folders[asked.lora_name] = folder
            return
        if folder is not None:
            self._engine.unload_adapter(UnloadLora(asked.lora_name))
        elif len(self._folders) == self._config.capacity:
            oldest = next(name for name in self._folders if name not in kept)
            self._engine.unload_adapter(UnloadLora(oldest))
            del self._folders[oldest]
        status, body = self._engine.load_adapter(LoadLora(asked.lora_name, asked.lora_path))
        if status != 200:
            raise InvalidRequest(body["message"])
        self._folders[asked.lora_name] = asked.lora_path
