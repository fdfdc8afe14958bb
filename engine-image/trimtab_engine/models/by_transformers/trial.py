"""Trial run of a transformers model, to find its KV cache layout and whether Trimtab can run it: the model is built
without weights on torch's meta device and run for three tokens with an attention that only records its calls. There is
no list of architectures; unsupported models are rejected with the reason that the trial found.

```
attention call             KV cache per token                      not supported
[heads, keys, values]      heads, sizes: equal in all layers       latent vectors, values of another size
a mask, as a function      all before a token, or a window of it   prefixes, blocks, ALiBi, custom masks
one call per layer         one entry per layer                     states (Mamba), attention shared by layers
options: sinks, soft caps  nothing                                 other options that change scores
```

If transformers has a plan for tensor-parallel ranks (division.py), one rank is tried as well.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trimtab_modelspec.config import Division
from trimtab_modelspec.kv_groups import LayerKV
from trimtab_modelspec.tensors import StoredTensor, Tensors

from trimtab_engine.models.by_transformers.division import (
    CannotDivide,
    Heads,
    Plan,
    Shapes,
    divide,
    part_of,
    plan_of,
    smallest_and_replicating,
)
from trimtab_engine.models.by_transformers.halves import Halves

TRIAL = "trimtab_trial"
"""The name of the attention, of the masks and of the experts of a trial."""
NOTEBOOK = "trimtab_notebook"
NUM_TOKENS = 3
ENDINGS = ("ForCausalLM", "LMHeadModel")
OWN_CHOICES = (
    "auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation",
    "fusion_config", "transformers_weights", "distributed_config", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "use_cache",
)  # fmt: skip
"""Words of config.json by which a checkpoint would choose code or outputs: they are passed over."""
UNDERSTOOD = frozenset({
    "dropout", "position_ids", "use_cache", "sliding_window", "output_attentions", "cache_position", "s_aux", "softcap",
    NOTEBOOK,
})  # fmt: skip
"""Attention arguments that are implemented, or do not change scores; the window is taken from the mask."""
MIXES_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
LENGTHWISE_ROPES = ("longrope",)  # beyond original_max_position_embeddings they turn all tokens otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model that can be run."""

    hidden_size: int
    intermediate_size: int
    """0 if the configuration has no such field."""
    vocab_size: int
    max_model_len: int
    num_attention_heads: int
    is_tied: bool
    layers: tuple[LayerKV, ...]
    """KV cache of each layer, in computation order."""
    modules: tuple[str, ...]
    """The names of the modules that attend, in the same order."""
    tensors: Tensors
    division: Division
    """Over how many tensor-parallel ranks it can be divided."""

    @property
    def heads(self) -> Heads:
        """Attention modules, as tensor-parallel plans need them."""
        each = self.layers[0]
        return Heads(self.num_attention_heads, each.num_kv_heads, each.key_size, self.modules)


@dataclass(frozen=True, slots=True)
class Refused:
    """A model that cannot be run, and why."""

    reason: str


class _CannotRun(Exception):
    """Raised when the trial run finds an unsupported feature."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Attention mask of a layer: (batch, head, query, key) -> bool, of positions."""

    sees: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """Arguments of one layer's attention call."""

    module: nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: object
    said: Mapping[str, object]


@dataclass(slots=True)
class _CallRecorder:
    """Recorded attention calls of all layers."""

    asked: list[_AttentionCall] = field(default_factory=list)


def _record_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    trimtab_notebook: _CallRecorder | None = None,
    scaling: float | None = None,
    **said: object,
) -> tuple[torch.Tensor, None]:
    if trimtab_notebook is None:
        raise _CannotRun("its layers do not hand on what attention has to know of a step")
    trimtab_notebook.asked.append(_AttentionCall(module, query.shape, key.shape, value.shape, attention_mask, said))
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _mask_as_function(*args: object, mask_function: Any, **kwargs: object) -> _Mask:
    return _Mask(mask_function)


def _no_experts(module: nn.Module, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Experts implementation whose result depends on values, which a trial run does not have."""
    return torch.empty_like(hidden)


AttentionInterface.register(TRIAL, _record_call)
AttentionMaskInterface.register(TRIAL, _mask_as_function)
ExpertsInterface.register(TRIAL, _no_experts)


@lru_cache(maxsize=4)
def try_out(text: str) -> Found | Refused:
    """Try out the model of a config.json, by its text."""
    words = json.loads(text)
    name = words["architectures"][0]
    model_class = class_of(name)
    if model_class is None:
        return Refused(_unknown(name, words))
    try:
        return _try_out(model_class, words)
    except _CannotRun as refusal:
        return Refused(f"transformers cannot run it here: {refusal}")
    except Exception as error:  # other people's code fails as it likes, and then it is not run
        said = str(error).strip().split("\n")[0]
        return Refused(f"the trial run of transformers' code failed: {type(error).__name__}: {said:.200}")


def class_of(name: str) -> Any:
    """transformers' class of that name, if it is a causal language model; else None."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not name.endswith(ENDINGS):
        return None
    return getattr(transformers, name, None)


def _unknown(name: str, words: Mapping[str, Any]) -> str:
    if "auto_map" in words:
        return "its code is in the checkpoint (auto_map), and code from checkpoints is never run"
    return f"transformers {transformers.__version__} has no causal language model of that name either"


def configuration(model_class: Any, words: Mapping[str, Any], implementation: str) -> Any:
    """Return transformers' configuration with Trimtab's attention."""
    config = model_class.config_class.from_dict(without_choices(words))
    config._attn_implementation = implementation
    return config


def without_choices(words: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a config.json without OWN_CHOICES, of its halves (`vision_config`) too."""
    kept = {key: value for key, value in words.items() if key not in OWN_CHOICES}
    return {key: without_choices(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _try_out(model_class: Any, words: Mapping[str, Any]) -> Found:
    config = configuration(model_class, words, TRIAL)
    config._experts_implementation = TRIAL
    _check_kind(model_class, config)
    whole = _built(model_class, config)
    _check_modules(whole)
    if "position_ids" not in inspect.signature(whole.get_decoder().forward).parameters:
        raise _CannotRun("it takes no positions")
    names = {id(module): name for name, module in whole.named_modules()}
    tensors, is_tied = _tensors(whole)
    seen = _run(whole, config)
    _check_kept(seen.cache, config.num_hidden_layers)
    max_len = _max_len(config)
    layers = _layers(seen.asked, config.num_hidden_layers, max_len)
    each = layers[0]
    modules = tuple(names[id(asked.module)] for asked in seen.asked)
    heads = Heads(seen.asked[0].query[1], each.num_kv_heads, each.key_size, modules)
    division, plan = _division(model_class, config, heads, seen.logits)
    return Found(
        hidden_size=seen.hidden[-1],
        intermediate_size=_count(getattr(config, "intermediate_size", 0)),
        vocab_size=seen.logits[-1],
        max_model_len=max_len,
        num_attention_heads=heads.num_heads,
        is_tied=is_tied,
        layers=layers,
        modules=modules,
        tensors={name: replace(tensor, part=part_of(plan, name, tensor.part)) for name, tensor in tensors.items()},
        division=division,
    )


def _built(model_class: Any, config: Any) -> Any:
    """The model, built without weights."""
    with torch.device("meta"):
        return model_class(config).eval()


@dataclass(frozen=True, slots=True)
class _TrialResult:
    """Record of a model without weights run on three tokens."""

    asked: Sequence[_AttentionCall]
    cache: Any
    hidden: torch.Size
    logits: torch.Size


def _run(whole: Any, config: Any) -> _TrialResult:
    """Run the trial, which modifies the model in place."""
    halves, notebook = Halves(whole), _CallRecorder()
    ids = torch.zeros(NUM_TOKENS, dtype=torch.int64, device="meta")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        hidden = halves.hidden(ids, torch.arange(NUM_TOKENS, device="meta"), placed=None, past_key_values=cache,
                               use_cache=True, **{NOTEBOOK: notebook})  # fmt: skip
        logits = halves.logits(hidden)
    return _TrialResult(notebook.asked, cache, hidden.shape, logits.shape)


def _division(model_class: Any, config: Any, heads: Heads, logits: torch.Size) -> tuple[Division, Plan | None]:
    """Over how many ranks the model can be divided, and how; the fewest are tried out."""
    try:
        plan = plan_of(_built(model_class, config), heads)
        degrees = plan.degrees()
        for degree in smallest_and_replicating(degrees, heads.num_kv_heads):
            _try_divided(model_class, config, plan, degree, logits)
    except CannotDivide as refusal:
        return Division((1,), str(refusal)), None
    except Exception as error:  # other people's code fails as it likes, and then it is not divided
        said = str(error).strip().split("\n")[0]
        return Division(
            (1,), f"its code does not run when divided by its plan ({type(error).__name__}: {said:.120})"
        ), None
    if degrees == (1,):
        return Division((1,), "no number of ranks divides its heads and projections"), None
    return Division(degrees, "its heads, projections and vocabulary must be divided evenly"), plan


def _try_divided(model_class: Any, config: Any, plan: Plan, degree: int, logits: torch.Size) -> None:
    """Try one of the given number of ranks: each layer must use the rank's heads, or all heads.

    Raises:
        CannotDivide: it does neither.
    """
    heads = plan.heads
    whole = _built(model_class, config)
    divide(whole, plan, Shapes(degree, degree - 1))
    seen = _run(whole, config)
    own = (heads.num_heads // degree, max(1, heads.num_kv_heads // degree))
    for asked in seen.asked:
        found = (asked.query[1], asked.key[1])
        if found not in (own, (heads.num_heads, heads.num_kv_heads)):
            raise CannotDivide(f"divided by its plan, a rank of {degree} has {found[0]} heads over {found[1]}")
    if seen.logits != logits:
        raise CannotDivide(f"divided by its plan, it returns {list(seen.logits)} logits")


def _check_kind(model_class: Any, config: Any) -> None:
    """Return the facts from the class and the configuration."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise _CannotRun("it has an encoder, or attends to one")
    if model_class._is_stateful:
        raise _CannotRun("its layers keep a state in addition to keys and values (recurrent or state-space layers)")


def _check_modules(whole: nn.Module) -> None:
    """Nothing but attention may let one token know of another: tokens of several requests are computed in a row."""
    for name, module in whole.named_modules():
        if isinstance(module, MIXES_TOKENS):
            raise _CannotRun(f"{name} is a {type(module).__name__}, which would mix tokens of several requests")


def _tensors(whole: Any) -> tuple[Tensors, bool]:
    """Return the model's number of parameters, each counted once, and True if the output layer is the embedding."""
    embedding, output = whole.get_input_embeddings(), whole.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding.weight
    seen: set[int] = set()
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor is embedding.weight:
            tensors[name] = StoredTensor(tuple(tensor.shape), "embedding")
        elif output is not None and tensor is output.weight:
            tensors[name] = StoredTensor(tuple(tensor.shape), "lm_head")
        else:
            tensors[name] = StoredTensor(tuple(tensor.shape), "replicated")
    return tensors, is_tied


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _max_len(config: Any) -> int:
    """Return the maximum request length: the number of distinct positions, before any rope scaling that makes them
    alike.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise _CannotRun("its config.json does not have max_position_embeddings")
    for rope in _ropes(config):
        if rope.get("rope_type", rope.get("type")) in LENGTHWISE_ROPES:
            longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
        if rope.get("rope_type", rope.get("type")) == "yarn":  # model cards leave max_position_embeddings as it was
            original, factor = rope.get("original_max_position_embeddings") or 0, rope.get("factor") or 1.0
            longest = max(longest, int(original * factor))
    return longest


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The rotations' parameters: one set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *parameters.values()]
    return [rope for rope in each if isinstance(rope, Mapping)]


def _layers(asked: Sequence[_AttentionCall], num_layers: int, max_len: int) -> tuple[LayerKV, ...]:
    """Return the KV cache of each layer, if Trimtab's attention can compute it."""
    if len(asked) != num_layers:
        raise _CannotRun(
            f"of its {num_layers} layers {len(asked)} use attention; the others keep another state per token (linear "
            f"attention, recurrent or state-space layers)"
        )
    if len({id(each.module) for each in asked}) != num_layers:
        raise _CannotRun("several layers share one attention")
    for each in asked:
        _check_call(each)
    layers = tuple(_layer(each, max_len) for each in asked)
    kinds = {(each.query[1], layer.num_kv_heads, layer.key_size) for each, layer in zip(asked, layers, strict=True)}
    if len(kinds) > 1:
        said = ", ".join(f"{heads} over {kv} of {size}" for heads, kv, size in sorted(kinds))
        raise _CannotRun(f"its layers have different heads ({said})")
    return layers


def _check_kept(cache: Any, num_layers: int) -> None:
    """Reject models whose layers share keys and values, by the contents of transformers' own cache."""
    kept: list[int] = [layer.get_seq_length() for layer in cache.layers]
    if kept != [NUM_TOKENS] * num_layers:
        raise _CannotRun(f"of its {num_layers} layers {kept.count(NUM_TOKENS)} keep their own keys and values")


def _check_call(asked: _AttentionCall) -> None:
    """Reject features that would change scores and are not supported."""
    if asked.query[2] != NUM_TOKENS or asked.key[2] != NUM_TOKENS:
        raise _CannotRun(f"a layer attends {asked.query[2]} queries to {asked.key[2]} keys of {NUM_TOKENS} tokens")
    if asked.key[3] != asked.value[3] or asked.query[3] != asked.key[3]:
        raise _CannotRun(f"keys have {asked.key[3]} elements and values {asked.value[3]}; supported are equal ones")
    if asked.query[1] % asked.key[1]:
        raise _CannotRun(f"{asked.query[1]} heads of queries are not a multiple of {asked.key[1]} of keys")
    if asked.said.get("is_causal") is False or not getattr(asked.module, "is_causal", True):
        raise _CannotRun("tokens see those after them")
    for word, value in asked.said.items():
        if value is not None and word not in UNDERSTOOD | {"is_causal"}:
            said = value if isinstance(value, (bool, int, float, str)) else type(value).__name__
            raise _CannotRun(f"its scores depend on {word} ({said})")


def _layer(asked: _AttentionCall, max_len: int) -> LayerKV:
    if not isinstance(asked.mask, _Mask):
        raise _CannotRun("it makes its mask by itself")
    window = _window(asked.mask, max_len)
    return LayerKV(num_kv_heads=asked.key[1], key_size=asked.key[3], value_size=asked.value[3], window=window)


def _window(mask: _Mask, max_len: int) -> int | None:
    """Return the window size in tokens, including the token itself, or None for full attention. The last position's
    mask gives the size; every other position must agree.
    """
    first = _first_seen(mask, max_len - 1)
    window = max_len - first
    probes = {0, 1, window - 1, window, window + 1, max_len // 2, max_len - 2}
    for position in (probe for probe in probes if 0 <= probe < max_len):
        if _first_seen(mask, position) != max(0, position - window + 1):
            raise _CannotRun("its tokens see neither all before them nor a window")
    return None if window == max_len else window


def _first_seen(mask: _Mask, position: int) -> int:
    """The first of the positions that one sees, which must be all from there up to itself."""
    none, keys = torch.tensor(0), torch.arange(position + 2)
    seen = mask.sees(none, none, torch.tensor(position), keys).expand(position + 2)
    first = int(seen.int().argmax())
    if not bool(seen[first : position + 1].all()) or bool(seen[position + 1]):
        raise _CannotRun("its tokens do not see all from one position up to themselves")
    return first
