"""--compilation-config as a typed value, with vLLM's names of the current version (mode) and its guides (level).

No mode uses torch.compile: the engine's kernels are already fused, and CUDA graphs remove the remaining host work
(ADR-0009). Modes 0 and 3 are therefore equal; modes 1 and 2, which only select torch.compile, are rejected. No tensors:
the API server's process reads it as well.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

import msgspec

from trimtab_engine.config.json_flags import convert_fields, read_json
from trimtab_engine.errors import ConfigError, NotSupportedError

FLAG = "--compilation-config"
MAX_CAPTURE_SIZE = 1 << 16  # tokens; far above any batch with noticeable launch cost
MAX_CAPTURE_SIZES = 1024  # each takes time at start-up and memory for good


class CompilationMode(IntEnum):
    """vLLM's: how much of the model torch.compile takes."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CompilationLevel(IntEnum):
    """The same numbers by the names of vLLM's guides."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class CUDAGraphMode(Enum):
    """Steps that replay graphs."""

    NONE = "none"
    """Every step is eager."""
    PIECEWISE = "piecewise"
    """Every step that is small enough; attention stays outside, so any mix of prefill and decode fits."""
    FULL = "full"
    """vLLM's: mixed steps as whole graphs too. Not built: a mixed step's attention depends on more than its size."""
    FULL_DECODE_ONLY = "full_decode_only"
    """Decode steps as one graph each, the others eager."""
    FULL_AND_PIECEWISE = "full_and_piecewise"
    """Decode steps as one graph each, the others piecewise."""

    @property
    def has_full(self) -> bool:
        """True if decode steps are one graph each."""
        return self in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)

    @property
    def has_piecewise(self) -> bool:
        """True if mixed steps replay graphs between their attention calls."""
        return self in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)


MODES_BY_LEVEL = {
    0: CUDAGraphMode.NONE,
    1: CUDAGraphMode.PIECEWISE,
    2: CUDAGraphMode.FULL_AND_PIECEWISE,
    3: CUDAGraphMode.FULL_AND_PIECEWISE,
}
"""Default cudagraph_mode of -O0 to -O3."""
DEFAULT_LEVEL = 2
BUILT_MODES = tuple(mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.FULL)
NOT_BUILT_FIELDS: dict[str, tuple[object, ...]] = {
    "backend": (None, ""),
    "bucket_size": (None,),
    "cache_dir": (None, ""),
    "compile_mm_encoder": (None, False),
    "compile_ranges_endpoints": (None, []),
    "compile_sizes": (None, []),
    "cudagraph_copy_inputs": (None, False),
    "cudagraph_num_of_warmups": (None, 0, 1),
    "cudagraph_specialize_lora": (None, True),
    "custom_ops": (None, []),
    "debug_dump_path": (None, ""),
    "full_cuda_graph": (None, False),
    "inductor_compile_config": (None, {}),
    "inductor_passes": (None, {}),
    "pass_config": (None, {}),
    "splitting_ops": (None, []),
    "use_inductor": (None, False),
    "use_inductor_graph_partition": (None, False),
}
"""Further fields of vLLM's, and the values without effect here."""


class CompilationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Compilation and capture settings. None means the optimization level's value, or the default of plan.py. `level`
    is an older name of `mode`.
    """

    mode: int | None = None
    level: int | None = None
    cudagraph_mode: CUDAGraphMode | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    cudagraph_lazy_capture: bool = False
    """Ours: capture a graph when a step first wants it, not at start-up."""

    @property
    def has_written_sizes(self) -> bool:
        """True if the user set the sizes or their maximum."""
        return self.cudagraph_capture_sizes is not None or self.max_cudagraph_capture_size is not None

    def __post_init__(self) -> None:
        for name, mode in (("mode", self.mode), ("level", self.level)):
            if mode is not None and mode not in tuple(CompilationMode):
                raise ConfigError(f"{FLAG}: {name} is {mode}; it must be 0 to {max(CompilationMode)}")
            if mode in (CompilationMode.STOCK_TORCH_COMPILE, CompilationMode.DYNAMO_TRACE_ONCE):
                raise NotSupportedError(
                    f"{FLAG}: {name} {int(mode)} ({CompilationMode(mode).name}) is torch.compile, which is not "
                    f"supported: "
                    f"the engine's kernels are already fused; use 0 or 3, and cudagraph_mode for graphs"
                )
        if None not in (self.mode, self.level) and self.mode != self.level:
            raise ConfigError(f"{FLAG}: mode is {self.mode}, but level, its older name, is {self.level}; give one")
        if self.cudagraph_mode is CUDAGraphMode.FULL:
            built = ", ".join(mode.value for mode in BUILT_MODES)
            raise NotSupportedError(
                f"{FLAG}: cudagraph_mode full is not supported: mixed steps cannot be one graph; use {built}"
            )
        sizes = self.cudagraph_capture_sizes
        for size in sizes or ():
            if not 1 <= size <= MAX_CAPTURE_SIZE:
                raise ConfigError(f"--cudagraph-capture-sizes has {size}; sizes are 1 to {MAX_CAPTURE_SIZE} tokens")
        if sizes is not None and len(sizes) > MAX_CAPTURE_SIZES:
            raise ConfigError(f"--cudagraph-capture-sizes has {len(sizes)} sizes; at most {MAX_CAPTURE_SIZES}")
        largest = self.max_cudagraph_capture_size
        if largest is not None and not 0 <= largest <= MAX_CAPTURE_SIZE:
            raise ConfigError(f"--max-cudagraph-capture-size is {largest}; it must be 0 to {MAX_CAPTURE_SIZE} tokens")
        if largest is not None and sizes and max(sizes) != largest:
            raise ConfigError(
                f"--max-cudagraph-capture-size is {largest}, but the largest of --cudagraph-capture-sizes is "
                f"{max(sizes)}; leave one of them out"
            )


def parse_compilation_json(text: str) -> dict[str, Any]:
    """Return the JSON of --compilation-config: an object, or a number, which is the mode. Raises ConfigError."""
    values = read_json(FLAG, text, _EXAMPLE)
    if isinstance(values, int) and not isinstance(values, bool):
        return {"mode": values}
    if not isinstance(values, dict):
        raise ConfigError(f"{FLAG} must be a JSON object, such as {_EXAMPLE}, or a number: its mode")
    return values


def compilation_config(values: Mapping[str, Any]) -> CompilationConfig:
    """Judge the fields of --compilation-config. Raises ConfigError, NotSupportedError for what vLLM has and we do
    not.
    """
    fields = {name: value for name, value in values.items() if value is not None}
    for name, harmless in NOT_BUILT_FIELDS.items():
        if fields.pop(name, None) not in harmless:
            raise NotSupportedError(f"{FLAG}: {name} {values[name]!r} is not supported; leave it out")
    unknown = sorted(fields.keys() - {field.name for field in msgspec.structs.fields(CompilationConfig)})
    if unknown:
        raise ConfigError(f"{FLAG} has no field {unknown[0][:60]!r}; its fields are {', '.join(_FIELDS)}")
    for name, names in (("mode", CompilationMode), ("level", CompilationLevel)):
        if isinstance(fields.get(name), str):
            fields[name] = _number(name, fields[name], names)
    if "cudagraph_mode" in fields:
        fields["cudagraph_mode"] = _graph_mode(fields["cudagraph_mode"])
    return convert_fields(FLAG, fields, CompilationConfig)


def _number(name: str, text: str, names: type[IntEnum]) -> int:
    """Return a mode by its name or by digits in a string."""
    if text.isdigit():
        return int(text)
    try:
        return int(names[text.upper()])
    except KeyError:
        raise ConfigError(f"{FLAG}: there is no {name} {text[:40]!r}; write 0 or 3") from None


def _graph_mode(value: object) -> CUDAGraphMode:
    """Return the mode of this name, in any case, as vLLM takes it."""
    if isinstance(value, CUDAGraphMode):
        return value
    try:
        return CUDAGraphMode(str(value).lower())
    except ValueError:
        built = ", ".join(mode.value for mode in BUILT_MODES)
        raise ConfigError(f"{FLAG}: there is no cudagraph_mode {str(value)[:40]!r}; use one of {built}") from None


_FIELDS = [field.name for field in msgspec.structs.fields(CompilationConfig)]
_EXAMPLE = '{"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": [1, 2, 4, 8]}'
