"""What every weight format offers, and the choice of the format. No torch at import, so that facts need none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from trimtab_engine.errors import ModelError

if TYPE_CHECKING:
    import torch

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"


Span = tuple[int, int]
"""[first, last)."""


class WeightSource(Protocol):
    """A checkpoint that was opened: its headers are read and found complete."""

    format: str
    """safetensors, gguf or dummy."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Keys as in config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Keys as in generation_config.json; empty when there is none."""
        ...

    @property
    def where(self) -> str:
        """The file to name in a message about the configuration."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by its transformers name."""
        ...

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """The tensor, perhaps a read-only view of the file. Raises ModelError when it is absent.

        `rows` and `columns` cut out a part; where the format allows it only that part is read. Rows of q and k are cut
        between heads.
        """
        ...


def model_path(model: str) -> Path:
    """The local path of `MODEL`: a path or file:// URI. Raises ModelError when nothing is there."""
    if model.startswith("file:"):
        path = Path(unquote(urlsplit(model).path))
    elif "://" in model:
        raise ModelError(f"model {model}: only a local path or file:///… can be loaded; mount or bake the model")
    else:
        path = Path(model)
    if not path.exists():
        raise ModelError(f"model {model}: no such file or folder")
    return path


def open_source(model: str, load_format: str = "auto", *, seed: int = 0) -> WeightSource:
    """Open the checkpoint. load_format auto takes safetensors before GGUF. Raises ModelError."""
    from trimtab_engine.weights.dummy import DummySource
    from trimtab_engine.weights.gguf_file import GgufSource
    from trimtab_engine.weights.safetensors_files import SafetensorsSource

    path = model_path(model)
    if load_format == "dummy":
        return DummySource(path, seed)
    if path.is_file():
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise _pickle_refused(path)
        if path.suffix.lower() != ".gguf" or load_format == "safetensors":
            raise ModelError(f"model {path}: give a folder with safetensors files, or a .gguf file")
        return GgufSource(path)
    has_safetensors = any(path.glob("*.safetensors"))
    ggufs = sorted(path.glob("*.gguf"))
    if has_safetensors and load_format in ("auto", "safetensors"):
        return SafetensorsSource(path)
    if ggufs and load_format in ("auto", "gguf"):
        if len(ggufs) > 1:
            names = ", ".join(p.name for p in ggufs)
            raise ModelError(f"model {path}: holds {len(ggufs)} GGUF files ({names}); name one of them")
        return GgufSource(ggufs[0])
    pickles = sorted(p for suffix in PICKLE_SUFFIXES for p in path.glob("*" + suffix))
    if pickles:
        raise _pickle_refused(pickles[0])
    wanted = "safetensors or GGUF" if load_format == "auto" else load_format
    raise ModelError(f"model {path}: no {wanted} file in it; use --load-format dummy to try a configuration alone")


def read_json(path: Path, *, required: bool = True) -> Mapping[str, Any]:
    """A JSON object from a file; {} when it is absent and not required. Raises ModelError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise ModelError(f"model {path.parent}: no {path.name} in it") from None
        return {}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _pickle_refused(path: Path) -> ModelError:
    return ModelError(
        f"model {path}: pickle formats ({', '.join(PICKLE_SUFFIXES)}) can run code and are never loaded; "
        f"convert the checkpoint to safetensors"
    )
