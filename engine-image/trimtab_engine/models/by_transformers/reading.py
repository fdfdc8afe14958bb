"""A checkpoint's weights read into a model of transformers', as transformers renames and joins them."""

from typing import Any

import torch
import transformers

from trimtab_engine.errors import ModelError
from trimtab_engine.models.loading import Loader


class _Unread:
    """A tensor of the checkpoint that is read when transformers takes it."""

    def __init__(self, load: Loader, name: str) -> None:
        self._load, self._name = load, name

    def __getitem__(self, whole: object) -> torch.Tensor:
        return self._load.stored(self._name)


def read_whole(model_class: Any, config: Any, load: Loader) -> tuple[Any, list[str], list[str]]:
    """The model, what the checkpoint lacks of it, and what it has besides; `config` names the attention. Raises
    ModelError for weights of other shapes."""
    logging_of_transformers: Any = transformers.utils.logging
    logging_of_transformers.disable_progress_bar()
    logging_of_transformers.set_verbosity_error()
    try:
        whole, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict={name: _Unread(load, name) for name in load.names()},
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
