"""Tensor parallelism for transformers models by their own plan (`tp_plan`), over Trimtab's process groups: each rank's
part of each parameter, and the communication around each module's matmul. transformers itself would use torch's
DTensors and a separate process group.

```
the plan says                 a rank holds        and its module
colwise                       rows                yields its columns
colwise_gather_output         rows                yields all columns, gathered
rowwise                       columns             takes its columns, sums over the ranks
rowwise_split_input           columns             takes all columns and uses its own, sums
packed_colwise                rows of each half   yields its columns of each
moe_tp_experts, all_reduce    by other entries    sums over the ranks
```

Embedding and output layer are always divided by rows of the vocabulary, as in Trimtab's own families. If there are
fewer key-value heads than ranks, several ranks hold the same rows. Unknown plan entries are rejected.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from trimtab_modelspec.partition import Span, vocabulary_span
from trimtab_modelspec.tensors import Part

UNCHANGED = frozenset({"replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj"})
"""Plan entries for training or DTensors: every rank holds and computes the whole module."""
SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
ROWS = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
COLUMNS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
SLICED = frozenset({"rowwise_split_input", "rowwise_rep"})
NUM_PACKED = 2  # gate and up
MAX_DEGREE = 64  # of ranks that are looked at: more share no CPU


class CannotDivide(Exception):
    """Raised when a model cannot be divided."""


class Ranks(Protocol):
    """The tensor-parallel group as one rank sees it: parallel/groups.py."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Shapes:
    """A group of a trial, in which nothing has numbers."""

    size: int
    index: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [size * rows, ...]."""
        return x.new_empty(self.size * x.shape[0], *x.shape[1:])

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] -> [rows, size * columns]."""
        return x.new_empty(x.shape[0], self.size * x.shape[1])


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of the whole model: number and size of heads, and the module names."""

    num_heads: int
    num_kv_heads: int
    size: int
    modules: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Return True if the module or parameter is part of attention."""
        return name.startswith(tuple(f"{module}." for module in self.modules))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of one rank, for plans that give attention the heads of all ranks: it computes its own and gathers."""

    own: slice
    own_kv: slice
    num_heads: int
    """Number of heads of all ranks together."""
    ranks: Ranks

    def gathered(self, output: torch.Tensor) -> torch.Tensor:
        """[num_tokens, own heads, size] -> [num_tokens, num_heads, size]."""
        rows, heads, size = output.shape
        whole = _gathered(self.ranks, output.reshape(rows, heads * size))
        return whole.view(rows, self.num_heads, size)


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a tensor: spans of one dimension, concatenated."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def extent(self) -> int:
        return sum(last - first for first, last in self.spans)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of that part."""
        return torch.cat([tensor.narrow(self.dim, first, last - first) for first, last in self.spans], dim=self.dim)


@dataclass(frozen=True, slots=True)
class Divided:
    """Division of one parameter, independent of the number of ranks."""

    dim: int
    part: Part
    num_packed: int = 1
    """Number of concatenated projections, each of which is divided."""

    def cut(self, extent: int, heads: Heads, size: int, index: int) -> Cut:
        """The part of one of `size` ranks."""
        if self.part in ("embedding", "lm_head"):
            return Cut(self.dim, (vocabulary_span(extent, size, index),))
        if self.part == "kv_projection" and heads.num_kv_heads < size:
            head = index * heads.num_kv_heads // size
            return Cut(self.dim, ((head * heads.size, (head + 1) * heads.size),))
        each, own = extent // self.num_packed, extent // self.num_packed // size
        firsts = (packed * each + index * own for packed in range(self.num_packed))
        return Cut(self.dim, tuple((first, first + own) for first in firsts))

    def fits(self, extent: int, heads: Heads, size: int) -> bool:
        """Return True if every rank gets an equal part."""
        if self.part in ("embedding", "lm_head"):
            return (size - 1) * -(-extent // size) < extent
        if self.part == "kv_projection" and heads.num_kv_heads < size:
            return size % heads.num_kv_heads == 0
        return extent % (self.num_packed * size) == 0


@dataclass(frozen=True, slots=True)
class Plan:
    """transformers' plan of one model, read and understood."""

    heads: Heads
    parameters: Mapping[str, Divided]
    modules: Mapping[str, str]
    """Plan entries of modules that communicate before or after their matmul."""
    extents: Mapping[str, int]
    """Size of each of `parameters` in the whole model, along the divided dimension."""

    def degrees(self) -> tuple[int, ...]:
        """The numbers of ranks over which everything can be divided, ascending; 1 is the first."""
        most = min(self.heads.num_heads, MAX_DEGREE)
        return tuple(size for size in range(1, most + 1) if size == 1 or self._fits(size))

    def _fits(self, size: int) -> bool:
        heads, kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            return False
        return all(divided.fits(self.extents[name], self.heads, size) for name, divided in self.parameters.items())


def plan_of(whole: Any, heads: Heads) -> Plan:
    """Read the tensor-parallel plan of this whole model.

    Raises:
        CannotDivide: the model has no plan, or the plan has unknown entries.
    """
    modules = dict(whole.named_modules())
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    rules = {name: style for name, style in _rules(whole, {*modules, *parameters}).items() if style not in UNCHANGED}
    outer = _vocabulary(whole, modules)
    divided: dict[str, Divided] = {}
    doing: dict[str, str] = {}
    for name, style in rules.items():
        if name in outer:
            continue
        if name in parameters:
            divided[name] = _of_parameter(name, style, parameters[name], heads)
            continue
        doing[name] = style
        if style not in SUMMED:
            divided |= _of_linear(name, style, modules[name], heads)
    if not divided:
        raise CannotDivide("it has no plan by which its layers are divided (base_model_tp_plan)")
    for name, part in outer.items():
        tensors = modules[name].named_parameters(recurse=False)
        divided |= {f"{name}.{own}": Divided(0, part) for own, _ in tensors}
    extents = {name: parameters[name].shape[each.dim] for name, each in divided.items()}
    return Plan(heads, divided, doing, extents)


def _rules(whole: Any, names: set[str]) -> dict[str, str]:
    """Return the plan with each layer's name substituted for the star."""
    found: dict[str, str] = {}
    for pattern, style in (whole.tp_plan or {}).items():
        meant = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        found |= {name: style for name in sorted(names) if meant.fullmatch(name)}
    return found


def _vocabulary(whole: Any, modules: Mapping[str, nn.Module]) -> dict[str, Part]:
    """The names of embedding and output layer."""
    embedding, output = whole.get_input_embeddings(), whole.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise CannotDivide(f"its embedding is a {type(embedding).__name__}")
    if not _is_linear(output):
        raise CannotDivide(f"its output layer is a {type(output).__name__}")
    names = {id(module): name for name, module in modules.items()}
    return {names[id(embedding)]: "embedding", names[id(output)]: "lm_head"}


def _is_linear(module: object) -> bool:
    """Return True if the module computes exactly nn.Linear."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _of_parameter(name: str, style: str, parameter: nn.Parameter, heads: Heads) -> Divided:
    part: Part = "attention" if heads.has(name) else "dense_mlp"
    if style == "colwise":
        return Divided(max(0, parameter.dim() - 2), part)
    if style == "packed_colwise" and parameter.dim() > 1:
        return Divided(parameter.dim() - 2, part, NUM_PACKED)
    if style == "rowwise" and parameter.dim() > 1:
        return Divided(parameter.dim() - 1, part)
    raise CannotDivide(f"its plan has {style} for {name}, which is not supported")


def _of_linear(name: str, style: str, module: nn.Module, heads: Heads) -> dict[str, Divided]:
    """A projection's weight, and the bias where ranks hold rows: of columns the bias is whole and added once."""
    if not _is_linear(module) or style not in ROWS | COLUMNS:
        raise CannotDivide(f"its plan has {style} for {name} ({type(module).__name__}), which is not supported")
    assert isinstance(module, nn.Linear)
    part: Part = "attention" if heads.has(name) else "dense_mlp"
    if style in COLUMNS:
        return {f"{name}.weight": Divided(1, part)}
    is_kv = module.out_features == heads.num_kv_heads * heads.size and heads.num_kv_heads < heads.num_heads
    if is_kv and heads.has(name) and style not in GATHERED:
        part = "kv_projection"
    each = Divided(0, part, NUM_PACKED if style == "packed_colwise" else 1)
    biases = {} if module.bias is None else {f"{name}.bias": each}
    return {f"{name}.weight": each, **biases}


def divide(whole: Any, plan: Plan, ranks: Ranks) -> dict[str, Cut]:
    """Turn a model built without weights (meta device) into one rank's: parameters get the shapes of their parts, and
    modules communicate as planned. Returns the part of each parameter to read.
    """
    cuts: dict[str, Cut] = {}
    made: dict[int, nn.Parameter] = {}
    for name, divided in plan.parameters.items():
        module, own = _owner(whole, name)
        parameter = getattr(module, own)
        cuts[name] = divided.cut(plan.extents[name], plan.heads, ranks.size, ranks.index)
        if id(parameter) not in made:  # tied weights are one parameter, and stay one
            made[id(parameter)] = nn.Parameter(cuts[name].of(parameter.data), requires_grad=False)
        setattr(module, own, made[id(parameter)])
    for name, style in plan.modules.items():
        _do(whole.get_submodule(name), style, ranks)
    _divide_vocabulary(whole, ranks)
    for name in plan.heads.modules:
        _set_head_counts(whole.get_submodule(name), plan, ranks)
    return cuts


def _owner(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, own = name.rpartition(".")
    return whole.get_submodule(parent), own


def _do(module: nn.Module, style: str, ranks: Ranks) -> None:
    """Wrap a module with the communication of its style."""
    if style in SUMMED:
        own = module.forward
        _replace(module, lambda *args, **kwargs: ranks.all_reduce(own(*args, **kwargs)))
    elif style in GATHERED:
        assert isinstance(module, nn.Linear)
        linear = module
        _replace(module, lambda x: _gathered(ranks, F.linear(x, linear.weight, linear.bias)))
    elif style in COLUMNS:
        assert isinstance(module, nn.Linear)
        _sum(module, ranks, is_sliced=style in SLICED)


def _replace(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    """Patch this module only and keep its class, as transformers requires."""
    module.forward = forward


def _sum(module: nn.Linear, ranks: Ranks, *, is_sliced: bool) -> None:
    """The product of this rank's columns, summed over the ranks; then the bias."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if is_sliced:
            x = x.chunk(ranks.size, dim=-1)[ranks.index]
        y = ranks.all_reduce(F.linear(x, module.weight))
        return y if module.bias is None else y + module.bias

    _replace(module, forward)


def _gathered(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    """[..., columns] of each rank -> [..., size * columns] on every rank."""
    rows = x.reshape(-1, x.shape[-1])
    parts = ranks.all_gather(rows).view(ranks.size, *rows.shape)
    return parts.transpose(0, 1).reshape(*x.shape[:-1], ranks.size * x.shape[-1])


def _divide_vocabulary(whole: Any, ranks: Ranks) -> None:
    embedding, output = whole.get_input_embeddings(), whole.get_output_embeddings()
    num_ids, vocab_size = embedding.num_embeddings, output.out_features
    embedding.padding_idx = None  # which would have to be one of this rank's rows
    first, last = vocabulary_span(num_ids, ranks.size, ranks.index)
    looked_up = embedding.forward

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up its own, and they sum."""
        elsewhere = (token_ids < first) | (token_ids >= last)
        found = looked_up((token_ids - first).masked_fill(elsewhere, 0))
        return ranks.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all ranks on the first rank, and unused zeros on the others."""
        own = F.linear(hidden, output.weight, output.bias).flatten(0, -2)
        missing = -(-vocab_size // ranks.size) - own.shape[1]  # the last part of the vocabulary may be short
        gathered = ranks.gather_columns(F.pad(own, (0, missing)))
        if gathered is None:
            return hidden.new_zeros(*hidden.shape[:-1], vocab_size)
        return gathered[:, :vocab_size].view(*hidden.shape[:-1], vocab_size)

    _replace(embedding, embed)
    _replace(output, logits)


def _set_head_counts(module: Any, plan: Plan, ranks: Ranks) -> None:
    """Set the number of query heads per key head where it differs on a rank: transformers' own attention reads it. It
    is unchanged where attention gets all heads.
    """
    is_divided = any(each.part == "kv_projection" for each in plan.parameters.values())
    if is_divided and hasattr(module, "num_key_value_groups"):
        kv_heads = max(1, plan.heads.num_kv_heads // ranks.size)
        module.num_key_value_groups = plan.heads.num_heads // ranks.size // kv_heads


def part_of(plan: Plan | None, name: str, otherwise: Part) -> Part:
    """Return the division of this parameter over ranks."""
    return otherwise if plan is None or name not in plan.parameters else plan.parameters[name].part


def smallest_and_replicating(degrees: Sequence[int], num_kv_heads: int) -> tuple[int, ...]:
    """The numbers of ranks that a trial tries: the smallest, and the smallest by which KV heads are held by several."""
    several = [degree for degree in degrees if degree > 1]
    return tuple(dict.fromkeys(several[:1] + [degree for degree in several if degree > num_kv_heads][:1]))
