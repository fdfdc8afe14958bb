"""Rules of the engine for parallel degrees (docs/concepts/parallelism.md), checked before any pod exists.

A table of rules. Each yields problems with the field, its value, the valid values and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trimtab_modelspec.quantization import BLOCK as FP8_BLOCK

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.resource.spec import Parallelism


@dataclass(frozen=True, slots=True)
class Problem:
    """An invalid number. `limit` describes the values that this rule allows."""

    field: str
    value: str
    limit: str
    reason: str

    def __str__(self) -> str:
        return f"is {self.value}, {self.reason}; {self.limit}"


MAX_SHOWN = 1024  # no degree is larger (spec.py); a model may have numbers of any size

SpecRule = Callable[[Parallelism], Iterator[Problem]]
FactsRule = Callable[[Parallelism, ModelFacts], Iterator[Problem]]


def spec_problems(parallelism: Parallelism) -> tuple[Problem, ...]:
    """Return the problems that do not depend on the model."""
    return tuple(problem for rule in SPEC_RULES for problem in rule(parallelism))


def facts_problems(parallelism: Parallelism, facts: ModelFacts) -> tuple[Problem, ...]:
    """Return the problems for this model."""
    return tuple(problem for rule in FACTS_RULES for problem in rule(parallelism, facts))


# --- pods -------------------------------------------------------------------------------------------------------------


def pods_are_full(parallelism: Parallelism) -> Iterator[Problem]:
    """Each pod requests gpusPerNode GPUs, and each GPU needs a rank."""
    ranks = parallelism.tensor * parallelism.pipeline * parallelism.data
    per_pod = parallelism.gpus_per_node
    if per_pod is None:
        return
    if per_pod > ranks:
        reason = f"but a replica has {ranks} rank{'s' * (ranks > 1)} (tensor × pipeline × data): a GPU would idle"
        yield Problem("spec.parallelism.gpusPerNode", str(per_pod), f"set it to {ranks}, or leave it out", reason)
    elif ranks % per_pod:
        reason = f"which does not divide the replica's {ranks} ranks (tensor × pipeline × data): a GPU would idle"
        engine = parallelism.tensor * parallelism.pipeline if parallelism.data > 1 else 1  # a pod holds whole engines
        yield Problem("spec.parallelism.gpusPerNode", str(per_pod), f"set {_divisors(ranks, ranks, engine)}", reason)


def engines_of_a_replica_are_whole(parallelism: Parallelism) -> Iterator[Problem]:
    """A replica has several engines, or one engine that spans pods, not both. `pods_are_full` rejects partial pods."""
    ranks, per_pod = parallelism.tensor * parallelism.pipeline, parallelism.gpus_per_node
    if parallelism.data == 1 or per_pod is None or per_pod % ranks == 0 or ranks * parallelism.data % per_pod:
        return
    reason = (
        f"but with data {parallelism.data} every pod must hold whole engines of {ranks} ranks (tensor × pipeline): "
        "only a single engine can span pods"
    )
    limit = f"set a multiple of {ranks}, or data to 1 and spec.replicas to {parallelism.data}"
    yield Problem("spec.parallelism.gpusPerNode", str(per_pod), limit, reason)


def experts_have_ranks_to_spread_over(parallelism: Parallelism) -> Iterator[Problem]:
    if parallelism.expert and parallelism.tensor * parallelism.data == 1:
        reason = "but tensor × data is 1, and experts are distributed over those ranks"
        yield Problem("spec.parallelism.expert", "true", "raise tensor or data, or set it to false", reason)


# --- the model --------------------------------------------------------------------------------------------------------


def ranks_divide_what_transformers_runs(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    """A model without an engine family uses transformers' tensor-parallel plan if there is one. Pipeline and expert
    parallelism are not supported; each data-parallel engine holds the whole model.
    """
    if not facts.is_by_transformers:
        return
    reason = f"but {facts.architecture} runs with transformers' code, which"
    more = "raise spec.replicas or data"
    if parallelism.tensor not in facts.tensor_sizes:
        sizes = _choice(facts.tensor_sizes)
        over = "does not support tensor ranks" if len(facts.tensor_sizes) == 1 else f"supports {sizes} tensor ranks"
        limit = f"set it to {sizes}, and {more}"
        yield Problem("spec.parallelism.tensor", str(parallelism.tensor), limit, f"{reason} {over}")
    if parallelism.pipeline > 1:
        limit = f"set it to 1, and {more}"
        yield Problem(
            "spec.parallelism.pipeline", str(parallelism.pipeline), limit, f"{reason} does not support pipeline stages"
        )
    if parallelism.expert:
        yield Problem(
            "spec.parallelism.expert", "true", "set it to false", f"{reason} does not support expert parallelism"
        )


def stages_have_layers(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    if parallelism.pipeline > facts.num_layers:
        reason = f"but the model has {facts.num_layers} layers"
        limit = f"set {facts.num_layers} or less"
        yield Problem("spec.parallelism.pipeline", str(parallelism.pipeline), limit, reason)


def heads_divide(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    yield from _divides(parallelism, facts.num_attention_heads, "num_attention_heads")


def kv_heads_divide_or_repeat(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    """KV heads are divided, or replicated if there are fewer heads than ranks. A latent vector is on every rank."""
    tensor, heads = parallelism.tensor, facts.num_kv_heads
    if facts.latent_kv_size or (heads % tensor == 0 if heads >= tensor else tensor % heads == 0):
        return
    reason = f"which is neither a divisor nor a multiple of num_key_value_heads {heads}"
    yield Problem(
        "spec.parallelism.tensor", str(tensor), f"set {_divisors(heads, heads)}, or a multiple of {heads}", reason
    )


def mlp_divides(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    if facts.has_dense_layers and not facts.is_by_transformers:
        yield from _divides(parallelism, facts.intermediate_size, "intermediate_size")


def every_rank_has_vocabulary(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    """Every rank has the same number of vocabulary rows; the last may have fewer, but at least one."""
    tensor, rows = parallelism.tensor, -(-facts.vocab_size // parallelism.tensor)
    if (tensor - 1) * rows >= facts.vocab_size:
        reason = f"but vocab_size {facts.vocab_size} in parts of {rows} rows leaves no row for the last rank"
        yield Problem("spec.parallelism.tensor", str(tensor), f"set {-(-facts.vocab_size // rows)} or less", reason)


def only_mixtures_have_experts(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    if parallelism.expert and not facts.is_moe and not facts.is_by_transformers:
        reason = f"but {facts.architecture} has no experts"
        yield Problem("spec.parallelism.expert", "true", "set it to false", reason)


def every_rank_has_experts(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    ranks = parallelism.tensor * parallelism.data
    if parallelism.expert and facts.is_moe and ranks > facts.num_experts:
        reason = f"but tensor × data gives {ranks} ranks and the model has {facts.num_experts} experts"
        limit = f"set a product of {facts.num_experts} or less, or expert to false"
        yield Problem(_larger_of_tensor_and_data(parallelism), _value(parallelism), limit, reason)


def experts_divide(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    """Without expert parallelism each expert's width is divided over tensor × data ranks."""
    ranks, width = parallelism.tensor * parallelism.data, facts.moe_intermediate_size
    if facts.is_moe and not parallelism.expert and width % ranks:
        reason = (
            f"but without expert parallelism each expert is split over tensor × data = {ranks} ranks, which do not "
        )
        reason += f"divide moe_intermediate_size {width}"
        limit = f"set a product that divides it ({_divisors(width, ranks)}), or expert to true"
        yield Problem(_larger_of_tensor_and_data(parallelism), _value(parallelism), limit, reason)


def fp8_blocks_stay_whole(parallelism: Parallelism, facts: ModelFacts) -> Iterator[Problem]:
    """Weights stored as fp8 have one scale per block, so a block must not be split over two ranks."""
    if facts.quantization != "fp8":
        return
    tensor, size = parallelism.tensor, facts.head_size
    divided = [("intermediate_size", facts.intermediate_size, tensor)] if facts.has_dense_layers else []
    if not facts.latent_kv_size:
        divided.append(("num_attention_heads × head_dim", facts.num_attention_heads * size, tensor))
        divided.append(("num_key_value_heads × head_dim", facts.num_kv_heads * size, min(tensor, facts.num_kv_heads)))
    if facts.is_moe and not parallelism.expert:
        divided.append(("moe_intermediate_size", facts.moe_intermediate_size, tensor * parallelism.data))
    for what, total, parts in divided:
        if parts > 1 and total % parts == 0 and total // parts % FP8_BLOCK:
            reason = f"but {what} {total} in {parts} parts cuts fp8 blocks of {FP8_BLOCK}"
            limit = f"set a degree whose parts are multiples of {FP8_BLOCK}"
            yield Problem(_larger_of_tensor_and_data(parallelism), _value(parallelism), limit, reason)


def _larger_of_tensor_and_data(parallelism: Parallelism) -> str:
    """Return the field to report if the product of both is too large."""
    return "spec.parallelism.data" if parallelism.data > parallelism.tensor else "spec.parallelism.tensor"


def _value(parallelism: Parallelism) -> str:
    return str(max(parallelism.tensor, parallelism.data))


def _divides(parallelism: Parallelism, total: int, what: str) -> Iterator[Problem]:
    tensor = parallelism.tensor
    if total % tensor:
        reason = f"which does not divide {what} {total}"
        yield Problem("spec.parallelism.tensor", str(tensor), f"set {_divisors(total, 2 * tensor)}", reason)


def _divisors(total: int, most: int, of: int = 1) -> str:
    """Return the largest eight divisors up to `most` that are multiples of `of`, as text."""
    found = [n for n in range(of, min(total, most, MAX_SHOWN) + 1, of) if total % n == 0][-8:]
    return _choice(found) if found else f"a multiple of {of}"


def _choice(numbers: Sequence[int]) -> str:
    """Return numbers as text, joined by commas and "or"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


SPEC_RULES: tuple[SpecRule, ...] = (
    experts_have_ranks_to_spread_over,
    pods_are_full,
    engines_of_a_replica_are_whole,
)
FACTS_RULES: tuple[FactsRule, ...] = (
    ranks_divide_what_transformers_runs,
    only_mixtures_have_experts,
    stages_have_layers,
    heads_divide,
    kv_heads_divide_or_repeat,
    mlp_divides,
    every_rank_has_vocabulary,
    every_rank_has_experts,
    experts_divide,
    fp8_blocks_stay_whole,
)
