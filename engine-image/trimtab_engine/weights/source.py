"""Interface of weight formats, and the choice of the format. No torch at import, so that model facts do not need it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trimtab_engine.errors import ModelError

if TYPE_CHECKING:
    import torch

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the small text files that a clone without Git LFS has instead of large ones."""
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors of parsing untrusted JSON and using its values, deep nesting and numbers such as 1e999 included."""


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

    def map_files(self) -> None:
        """Map the files that tensors are views of; what tensor() takes beyond that are copies."""
        ...

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """The tensor, perhaps a read-only view of the file. Raises ModelError when it is absent.

        `rows` and `columns` cut out a part; where the format allows it only that part is read. Rows of q and k are cut
        between heads.
        """
        ...


def read_json(path: Path, *, required: bool = True) -> Mapping[str, Any]:
    """A JSON object from a file; {} when it is absent and not required. Raises ModelError."""
    try:
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise ModelError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull` in {path.parent}")
        value = json.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ModelError(f"model {path.parent}: no {path.name} in it") from None
        return {}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value
