"""What a step should take before anything was measured: the roofline of the layout (`layout/cost.py`) as the tuner's
coefficients. It is a start; after a few looks only what the load does not show is still near it."""

from __future__ import annotations

from trimtab_operator.layout.cost import Hardware, decode_step, prefill_seconds_per_token
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.resource.spec import Parallelism
from trimtab_operator.tuner.engine_model import StepCost

OVERHEAD_SECONDS = 0.003  # of a step: scheduling, launching, sampling
SEQUENCE_SECONDS = 20e-6  # of host work for each sequence of a step
BATCH, LONG, CHUNK = 16, 8192, 2048  # where the roofline is read: sequences, tokens of context, tokens of a prompt


def step_prior(facts: ModelFacts, parallelism: Parallelism, gpu: Gpu) -> StepCost:
    """Seconds per step, token, sequence, token of context and pair of tokens, as guessed."""
    hardware = Hardware(gpu=gpu)

    def decoding(context: float) -> float:
        return decode_step(facts, parallelism, hardware, batch=BATCH, context=context).seconds

    def prompt_token(context: float) -> float:
        return prefill_seconds_per_token(facts, parallelism, hardware, chunk=CHUNK, context=context)

    return StepCost(
        per_step=OVERHEAD_SECONDS + decode_step(facts, parallelism, hardware, batch=1, context=0).seconds,
        per_token=prompt_token(0),
        per_sequence=SEQUENCE_SECONDS,
        per_context=(decoding(LONG) - decoding(0)) / (BATCH * LONG),
        per_attended=max(0.0, prompt_token(LONG) - prompt_token(0)) / LONG,
    )
