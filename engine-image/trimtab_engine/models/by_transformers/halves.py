"""transformers' causal language models split into the two halves of a step: token ids to hidden states of all tokens,
and hidden states of some rows to logits. Logits processing (scales, soft caps, biases) is left to the model's own code,
which is called with hidden states instead of the decoder's output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from trimtab_engine.layers.vocabulary import Placed


@dataclass
class HiddenStates(MoeModelOutputWithPast):
    """Output of a decoder with all optional fields; only the hidden states are set."""

    cross_attentions: None = None


class Given(nn.Module):
    """Stand-in for the decoder that returns its input embeddings."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> HiddenStates:
        return HiddenStates(last_hidden_state=inputs_embeds)


class Halves:
    """A model built by transformers, split in place."""

    def __init__(self, whole: Any) -> None:
        names = {id(module): name for name, module in whole.named_modules()}
        self.modules: Mapping[str, nn.Module] = dict(whole.named_modules())
        """All modules by their names in the model, as long as it was whole."""
        self.decoder = whole.get_decoder()
        name = names[id(self.decoder)]
        if not name:
            raise ValueError("its decoder and its output layer are one module")
        parent, _, own = name.rpartition(".")
        setattr(whole.get_submodule(parent), own, Given())
        whole.config.pad_token_id = None  # nothing is padded; where there is one, each step looks for it in vain
        self._whole = whole

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, *, placed: Placed | None = None, **more: Any
    ) -> torch.Tensor:
        """Return token_ids, positions [num_tokens] int64 -> [num_tokens, hidden_size], after the last norm. `placed`:
        embeddings of tokens that are not text.
        """
        given: dict[str, Any] = {"use_cache": False, **more}
        if placed is None:
            given["input_ids"] = token_ids.unsqueeze(0)
        else:
            embeddings = self.decoder.get_input_embeddings()(token_ids)
            given["inputs_embeds"] = embeddings.index_copy(0, *placed).unsqueeze(0)
        output = self.decoder(position_ids=positions.unsqueeze(0), **given)
        hidden: torch.Tensor = output[0][0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        logits: torch.Tensor = self._whole(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()
