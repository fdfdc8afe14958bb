"""Interface of weight formats, and the choice of the format. No torch at import, so that model facts do not need it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

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
