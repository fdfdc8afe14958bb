"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) as PEFT writes them: a folder with `adapter_config.json`
and `adapter_model.safetensors`. Only adapters of the form  W x + scale * up (down x)  are supported.

No torch at import. What of the model an adapter fits is not known here (models/adapter_fit.py).
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.model_files.json_files import read_json
from trimtab_engine.weights.safetensors_files import read_header
from trimtab_engine.weights.source import DAMAGE

if TYPE_CHECKING:
    import torch

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
FLOATS = ("F32", "F16", "BF16")
WRAPPED = "base_model.model."
"""Prefix of each module name, followed by the model's own name."""
DECODERS = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.")
"""Prefixes of a decoder's layers, also in vision-language models; the first is Trimtab's."""
FACTORS = {".lora_A.weight": 0, ".lora_B.weight": 1}
HARMLESS: dict[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Fields with which an adapter is more than two factors per module, or changes the model's own weights, and the values
in addition to null with which it is not."""
PATTERN = re.compile(r"\^?[\w.]+")


@dataclass(frozen=True, slots=True)
class AdaptedShape:
    """The factors of one module: down [rank, in_features], up [out_features, rank]."""

    rank: int
    in_features: int
    out_features: int
    scale: float
    """Factor of the adapter's product."""


class PeftAdapter:
    """One that was opened: its configuration and its file's header are read and found whole."""

    def __init__(self, folder: Path) -> None:
        """Open an adapter.

        Raises:
            ModelError: a file is missing or damaged.
            NotSupportedError: the adapter needs an unsupported feature.
        """
        self.where = str(folder)
        try:
            self._open(folder)
        except OSError as error:
            raise ModelError(f"adapter {folder}: cannot be read: {error.strerror or error}") from None
        except DAMAGE as error:
            raise ModelError(f"adapter {folder}: is damaged: {type(error).__name__}: {error}; save it again") from None

    def _open(self, folder: Path) -> None:
        config_file, self._file = folder / CONFIG_FILE, folder / TENSORS_FILE
        _check_folder(folder)
        config = read_json(config_file)
        _check_built(config, config_file)
        self.target_modules = _targets(config)
        """Names, or name suffixes, of adapted modules; empty if the configuration has none or a pattern."""
        header = read_header(self._file)
        self._names: dict[str, list[str]] = {}
        """The tensors of each module, down before up."""
        for name in header:
            module, which = _factor(name, self._file)
            self._names.setdefault(_ours(module), ["", ""])[which] = name
        scaling = _Scaling(config, config_file)
        self.modules = {
            module: _shape(module, names, header, scaling, self._file) for module, names in self._names.items()
        }
        """Adapted modules by the model's own names, such as model.layers.0.self_attn.q_proj."""
        if not self.modules:
            raise ModelError(f"{self._file}: holds no tensors of an adapter")
        self.max_rank = max(shape.rank for shape in self.modules.values())
        digest = hashlib.sha256(hashlib.sha256(config_file.read_bytes()).digest())
        with self._file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
        self.digest = digest.digest()
        """SHA-256 of its files: equal ones are one adapter."""

    def factors(self, module: str) -> "tuple[torch.Tensor, torch.Tensor]":
        """down [rank, in_features] and up [out_features, rank] as they are stored, up without the scale."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file, framework="pt") as opened:
                down, up = (opened.get_tensor(name) for name in self._names[module])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._file}: {module} cannot be read: {error}") from None
        return down, up


class _Scaling:
    """Rank and scale of each module, from the configuration."""

    def __init__(self, config: Mapping[str, Any], where: Path) -> None:
        self._where = where
        self._rank, self._alpha = _number(config, "r", where), _number(config, "lora_alpha", where)
        self._ranks, self._alphas = (_pattern(config, name, where) for name in ("rank_pattern", "alpha_pattern"))
        self._takes_root = bool(config.get("use_rslora"))

    def of(self, module: str, rank: int) -> float:
        """Return the rank and scale of a module, by its name in the file.

        Raises:
            ModelError: its tensors have another rank.
        """
        said = _matching(self._ranks, module, self._rank)
        if said != rank:
            raise ModelError(f"{self._where}: rank {said:g} of {module} differs from its tensors' ({rank})")
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._takes_root else rank)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"adapter {folder}: is no folder here; give one with {CONFIG_FILE} and {TENSORS_FILE}")
    pickle = next((name for name in PICKLES if (folder / name).exists()), None)
    if not (folder / TENSORS_FILE).exists() and pickle is not None:
        raise NotSupportedError(
            f"adapter {folder}: its tensors are in {pickle}, a pickle, which can run code as it loads; save it as "
            f"{TENSORS_FILE} (PEFT: save_pretrained(..., safe_serialization=True))"
        )
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (folder / name).is_file():  # a pipe would keep the reader waiting
            raise ModelError(f"adapter {folder}: no {name} in it; a PEFT adapter has {CONFIG_FILE} and {TENSORS_FILE}")


def _check_built(config: Mapping[str, Any], where: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise NotSupportedError(f"{where}: peft_type is {kind!r}, which is not supported; built is LORA")
    for name, harmless in HARMLESS.items():
        value = config.get(name)
        if value is not None and value not in harmless:
            raise NotSupportedError(
                f"{where}: {name} is {str(value)[:100]}, which is not supported; merge the adapter into the model and "
                f"serve that, or train it without"
            )


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("target_modules")
    return tuple(sorted(map(str, given))) if isinstance(given, list) else ()


def _number(config: Mapping[str, Any], name: str, where: Path) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {name} is {str(value)[:100]}; it must be a number above 0")
    return value


def _pattern(config: Mapping[str, Any], name: str, where: Path) -> dict[str, float]:
    """Numbers by the names of modules. PEFT reads these as regular expressions: built are names, and ends of names."""
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise ModelError(f"{where}: {name} is no object of numbers by module")
    found = {}
    for pattern in given:
        plain = str(pattern).replace("\\.", ".")
        if not PATTERN.fullmatch(plain):
            raise NotSupportedError(
                f"{where}: {name} has the pattern {plain[:100]!r}; supported are names of modules, and ends of names"
            )
        found[plain] = _number(given, pattern, where)
    return found


def _matching(numbers: Mapping[str, float], module: str, default: float) -> float:
    """That of the first pattern that names the module, from its beginning after a ^."""
    for pattern, number in numbers.items():
        if pattern.removeprefix("^") == module or (pattern[0] != "^" and module.endswith("." + pattern)):
            return number
    return default


def _factor(name: str, file: Path) -> tuple[str, int]:
    """The module of a tensor, by the name that it has in the file, and which of its factors the tensor is."""
    ending = next((ending for ending in FACTORS if name.endswith(ending)), None)
    if ending is None or not name.startswith(WRAPPED):
        raise NotSupportedError(
            f"{file}: has the tensor {name[:200]}; supported are {WRAPPED}MODULE with {' and '.join(FACTORS)}"
        )
    return name.removeprefix(WRAPPED).removesuffix(ending), FACTORS[ending]


def _ours(module: str) -> str:
    """The name that the model's own files have for it."""
    prefix = next((prefix for prefix in DECODERS if module.startswith(prefix)), None)
    return module if prefix is None else DECODERS[0] + module.removeprefix(prefix)


def _shape(module: str, names: list[str], header: Mapping[str, Any], scaling: _Scaling, file: Path) -> AdaptedShape:
    if "" in names:
        raise ModelError(f"{file}: of {module} only one of the two factors lora_A and lora_B is there")
    down, up = (header[name]["shape"] for name in names)
    for name in names:
        if header[name]["dtype"] not in FLOATS:
            raise ModelError(f"{file}: tensor {name} is {header[name]['dtype']}; supported are {', '.join(FLOATS)}")
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or 0 in (*down, *up):
        raise ModelError(f"{file}: the factors of {module} are {down} and {up}; [rank, in] and [out, rank] are needed")
    stored = names[0].removeprefix(WRAPPED).removesuffix(".lora_A.weight")
    return AdaptedShape(down[0], down[1], up[0], scaling.of(stored, down[0]))
