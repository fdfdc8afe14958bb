"""Low-rank adapters as they are configured: which are served, how many a step may have, and how large one may be. Names
and defaults are vLLM's.

Knows no tensor: the API server's process reads it as well.
"""

import msgspec

from trimtab_engine.errors import ConfigError, NotSupportedError

FLAG = "--lora-modules"
MAX_ADAPTERS = 1024  # far above any real use; rejects absurd values early
MAX_RANK = 4096  # the width of small models: a higher rank is not low-rank
MAX_NAME_CHARACTERS = 256


class AdapterModule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that is served from the start: by which name, and from which folder."""

    name: str
    path: str
    base_model_name: str | None = None
    """Name of the parent model to report. None means the first served name."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if "://" in self.path.removeprefix("file://"):
            raise NotSupportedError(
                f"{FLAG}: the adapter {self.name} is at {self.path[:200]}, and adapters are not fetched; download it "
                f"and give its folder"
            )

    @property
    def folder(self) -> str:
        """Folder of its files."""
        return self.path.removeprefix("file://")


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters are served."""

    modules: tuple[AdapterModule, ...] = ()
    max_loras: int = 1
    """Different ones that a step may have."""
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    """Maximum number of loaded adapters. None means as many as are served from the start, and at least as many as a
    step may have.
    """
    is_updatable: bool = False
    """True if clients may load and unload adapters."""

    @property
    def capacity(self) -> int:
        """Maximum number of loaded adapters."""
        return self.max_cpu_loras or max(self.max_loras, len(self.modules))

    def __post_init__(self) -> None:
        for flag, value, most in (
            ("--max-loras", self.max_loras, MAX_ADAPTERS),
            ("--max-lora-rank", self.max_lora_rank, MAX_RANK),
            ("--max-cpu-loras", self.capacity, MAX_ADAPTERS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{flag} is {value}; it must be between 1 and {most}")
        if self.capacity < max(self.max_loras, len(self.modules)):
            raise ConfigError(
                f"--max-cpu-loras is {self.capacity}, but --max-loras is {self.max_loras} and {FLAG} names "
                f"{len(self.modules)}: all of them are kept in memory; raise it to "
                f"{max(self.max_loras, len(self.modules))}, or leave it out"
            )
        names = [module.name for module in self.modules]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{FLAG} names the adapter {twice} twice; give each adapter a unique name")


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a model in a request."""
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ConfigError(
            f"{name[:100]!r} cannot be an adapter's name; it needs 1 to {MAX_NAME_CHARACTERS} printable characters"
        )
