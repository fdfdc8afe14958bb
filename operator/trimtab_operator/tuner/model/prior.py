"""What a step should take, before anything was measured: from the model's shape and what the device can do.

Decoding reads all weights once a step and each sequence's KV once (memory), prefill multiplies (compute):

    per step      = overhead + weights ÷ bandwidth
    per token     = 2·parameters ÷ rate                      per sequence  = what the host does for each
    per context   = KV bytes of a token ÷ bandwidth          per attended  = 4·layers·heads·head size ÷ rate

Datasheet numbers times what well-made engines reach of them. It is a start: after a few scrapes only coefficients that
the load does not show are still near it.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_operator.tuner.twin import StepCost

OVERHEAD_SECONDS = 0.003  # of a step: scheduling, launching, sampling
SEQUENCE_SECONDS = 20e-6  # of host work for each sequence of a step
BANDWIDTH_SHARE = 0.75  # of the datasheet's memory bandwidth that decoding reaches
COMPUTE_SHARE = 0.55  # of the datasheet's matrix rate that prefill reaches


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides what its steps take, for one replica's ranks together."""

    parameters: float
    """That one token passes: of a mixture only the active ones."""
    weights_bytes: float
    """That one step reads."""
    kv_bytes_per_token: float
    attention_flops: float = 0.0
    """Per pair of a token and one that it attends to: 4 · layers · heads · head size."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one device can do by its datasheet; `count` of them share the work."""

    bytes_per_second: float
    flops: float
    count: int = 1


GENERIC_GPU = Device(bytes_per_second=2.0e12, flops=4.0e14)
CPU = Device(bytes_per_second=2.0e10, flops=1.5e11)
DEVICES = {  # by a part of the name that the driver gives: memory bandwidth, dense bf16 rate
    "B200": Device(8.0e12, 2.25e15),
    "H200": Device(4.8e12, 9.9e14),
    "H100": Device(3.35e12, 9.9e14),
    "A100": Device(2.0e12, 3.12e14),
    "L40S": Device(8.64e11, 3.62e14),
    "L4": Device(3.0e11, 1.21e14),
    "A10": Device(6.0e11, 1.25e14),
    "T4": Device(3.2e11, 6.5e13),
}
"""Longer names first where one is part of another."""


def device_named(name: str, count: int = 1) -> Device:
    """The device whose name this contains; a middling GPU where none does."""
    upper = name.upper()
    found = next((device for key, device in DEVICES.items() if key in upper), GENERIC_GPU)
    return Device(found.bytes_per_second, found.flops, count)


def prior_cost(shape: Shape, device: Device) -> StepCost:
    """Seconds per step, token, sequence, context token and attended pair, as guessed."""
    bandwidth = device.bytes_per_second * device.count * BANDWIDTH_SHARE
    rate = device.flops * device.count * COMPUTE_SHARE
    return StepCost(
        per_step=OVERHEAD_SECONDS + shape.weights_bytes / bandwidth,
        per_token=2 * shape.parameters / rate,
        per_sequence=SEQUENCE_SECONDS,
        per_context=shape.kv_bytes_per_token / bandwidth,
        per_attended=shape.attention_flops / rate,
    )
