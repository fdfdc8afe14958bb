"""Requests served to their end step by step, with recorded statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine_benchmarks.parity import Reference, compare
from trimtab_engine.core.engine import Engine
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling


@dataclass
class Served:
    """Token ids by request, preemptions by mode and prompt tokens that were found in the prefix cache."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted: Counter[str] = field(default_factory=Counter)
    prefix_cache_hits: int = 0


def serve(
    engine: Engine,
    requests: Iterable[AddRequest],
    before_step: Callable[[int], object] = lambda number: None,
) -> Served:
    """Serve them all together; the engine's invariants hold after every step. `before_step` gets the step's number."""
    served = Served()
    for request in requests:
        served.tokens[request.request_id] = []
        engine.add(request)
    number = 0
    while engine.has_work:
        before_step(number)
        number += 1
        step = engine.step()
        engine.check_integrity()
        served.prefix_cache_hits += step.stats.prefix_cache_hits
        for mode, reasons in step.stats.preempted.items():
            served.preempted[mode] += sum(reasons.values())
        for output in step.outputs:
            served.tokens[output.request_id] += output.token_ids
    return served


def greedy_requests(prompts: Iterable[list[int]], num_tokens: int) -> list[AddRequest]:
    """Return one request per prompt, named by its number, that generates exactly `num_tokens`."""
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [AddRequest(str(number), prompt, sampling, arrival_time=0.0) for number, prompt in enumerate(prompts)]


def served_twice_with_resizes(engine: Engine, references: list[Reference]) -> list[Served]:
    """`served_twice` while the KV cache shrinks and grows every 25 steps."""
    least = engine.config()["fields"]["gpu_memory_utilization"]["min"]

    def resize(step: int) -> None:
        if step % 25 == 0:
            size = least if step % 50 == 0 else round(least + 2e-4, 4)
            assert engine.patch_config(PatchConfig({"gpu_memory_utilization": size}))[0] == 200

    return served_twice(engine, references, resize)


def served_twice(
    engine: Engine, references: list[Reference], before_step: Callable[[int], object] = lambda number: None
) -> list[Served]:
    """Three of each reference's prompt together, and once more. The tokens are the references'."""
    served: list[Served] = []

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        served.append(serve(engine, greedy_requests(prompts, num_tokens), before_step))
        return list(served[-1].tokens.values())

    for _ in range(2):
        parity = compare(references * 3, generate)
        assert parity.defects == []
        assert parity.near_ties <= 3
    return served
