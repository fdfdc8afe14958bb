"""A checkpoint's weights read into a model of transformers', as transformers renames and joins them, whole or one
rank's parts of them: a part is cut out of each tensor of the checkpoint before transformers sees it.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.models.by_transformers.division import NUM_PACKED, Cut
from trimtab_engine.models.loading import Loader

Divide = Callable[[Any], Mapping[str, Cut]]
"""Turns a model built without weights into one rank's, and returns the part of each parameter to read."""

BUILDING = Lock()
"""While transformers reads a model it has switched off, for the whole process, that weights get first values and are
tied: of two that are read at once the second would leave it so for good."""


class _Unread:
    """A tensor of the checkpoint that is read when transformers takes it."""

    def __init__(self, load: Loader, name: str, cuts: Mapping[str, Cut]) -> None:
        self._load, self._name, self._cuts = load, name, cuts

    def __getitem__(self, whole: object) -> torch.Tensor:
        cut = self._cuts.get(self._name)
        return self._load.stored(self._name) if cut is None else _part(self._load, self._name, cut)


def _part(load: Loader, name: str, cut: Cut) -> torch.Tensor:
    """Read only the part of a tensor with rows and columns."""
    if len(load.shape(name)) > 2:
        return cut.of(load.stored(name))
    which = "columns" if cut.dim else "rows"
    parts = [load.stored(name, **{which: span}) for span in cut.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.dim)


def read_whole(model_class: Any, config: Any, load: Loader) -> tuple[Any, list[str], list[str]]:
    """Return the model, the tensors missing from the checkpoint, and the unexpected ones; `config` names the attention.

    Raises:
        ModelError: weights have other shapes.
    """
    return _read(model_class, config, load, {})


def read_part(model_class: Any, config: Any, load: Loader, divide: Divide) -> tuple[Any, list[str], list[str]]:
    """Return one rank's part of the model, as above.

    Raises:
        NotSupportedError: the checkpoint stores divided tensors in another layout.
    """
    cuts: dict[str, Cut] = {}

    def build(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        cuts.update(_cuts_of_stored(self, divide(self), load))

    own = {"__init__": build, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return _read(type(model_class.__name__, (model_class,), own), config, load, cuts)


def _read(model_class: Any, config: Any, load: Loader, cuts: Mapping[str, Cut]) -> tuple[Any, list[str], list[str]]:
    """`cuts`, by names in the checkpoint, may be filled as the model is built."""
    logging_of_transformers: Any = transformers.utils.logging
    logging_of_transformers.disable_progress_bar()
    logging_of_transformers.set_verbosity_error()
    try:
        with BUILDING:
            whole, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict={name: _Unread(load, name, cuts) for name in load.names()},
                dtype=load.dtype,
                attn_implementation=config._attn_implementation,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except (RuntimeError, ValueError) as error:
        said = str(error).strip().split("\n")[0]
        name = model_class.__name__
        raise ModelError(f"{load.where}: the weights cannot be read as {name}: {said:.300}") from error
    return whole.to(load.device).eval(), sorted(info["missing_keys"]), sorted(info["unexpected_keys"])


def _cuts_of_stored(whole: Any, cuts: Mapping[str, Cut], load: Loader) -> dict[str, Cut]:
    """Return the part of each checkpoint tensor to read, given the part of each parameter."""
    transforms = get_model_conversion_mapping(whole)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    parameters, found = whole.state_dict(), {}
    for name in load.names():
        target, pattern = rename_source_key(name, renamings, converters, whole.base_model_prefix, parameters)
        if target not in parameters and name in parameters:
            target, pattern = rename_source_key(name, [], [], whole.base_model_prefix, parameters)
        if target in cuts:
            operations = [] if pattern is None else by_pattern[pattern].operations
            found[name] = _before(operations, cuts[target], load.shape(name), name)
    return found


def _before(operations: Sequence[Any], cut: Cut, shape: Sequence[int], name: str) -> Cut:
    """Return the part of a checkpoint tensor that becomes the part of a parameter, given how transformers merges
    tensors: all experts into one tensor with a leading dimension, and two projections into one, the second after the
    first.
    """
    known = all(isinstance(operation, MergeModulelist | Concatenate) for operation in operations)
    is_merged = any(isinstance(operation, MergeModulelist) for operation in operations)
    num_dims = len(shape) + is_merged
    is_joined = any(isinstance(each, Concatenate) and each.dim % num_dims == cut.dim for each in operations)
    if not known or cut.dim >= num_dims or (is_joined and len(cut.spans) != NUM_PACKED):
        raise NotSupportedError(
            f"{name}: the checkpoint stores it in another form than transformers computes, of which ranks cannot read "
            f"their parts; leave --tensor-parallel-size out, or start more replicas"
        )
    return Cut(cut.dim - is_merged, cut.spans[:1] if is_joined else cut.spans)
