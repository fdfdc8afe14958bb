"""Hardware and model of a replica: step times and KV memory.

The figures of llama-3.1-8b on an H200 are those of the published replays that this simulator is compared with: step = 8
ms + tokens / 16,000 s + 0.03 ms per sequence + 4 ns per context token, 1M KV tokens. Other pairs are measured
(`--calibration FILE`): five sums per kind of step, as exported by the engine and fitted by least squares, or the
coefficients themselves.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab_operator.tuner.engine_model import StepCost

from trimtab_simulator.errors import BadCalibration, BadRequest

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and model of a replica. `kv_tokens` is at START_UTILIZATION; more utilization holds more of them.

    `max_num_seqs` and `max_num_batched_tokens` are the engine's defaults there.
    """

    model: str
    gpu: str
    cost: StepCost
    kv_tokens: int
    device_bytes: int = 141 * 10**9
    bytes_per_token: int = 131_072
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_num_seqs_cap: int = 1024
    max_num_batched_tokens_cap: int = 16_384
    max_model_len: int = 131_072
    num_gpus: int = 1
    cap_utilization: float = 0.95
    """Maximum of gpu_memory_utilization."""

    def blocks_at(self, utilization: float) -> int:
        """Return the KV blocks at a gpu_memory_utilization."""
        tokens = self.kv_tokens + (utilization - START_UTILIZATION) * self.device_bytes / self.bytes_per_token
        return max(1, math.floor(tokens / self.block_size))

    @property
    def least_utilization(self) -> float:
        """The utilization at which the KV cache holds one request of full length."""
        missing = (self.max_model_len - self.kv_tokens) * self.bytes_per_token / self.device_bytes
        return max(0.01, min(START_UTILIZATION, math.ceil((START_UTILIZATION + missing) * 10_000) / 10_000))

    def with_kv_tokens(self, tokens: int) -> Machine:
        """Return the machine with another KV cache size at the start."""
        return replace(self, kv_tokens=tokens, max_model_len=min(self.max_model_len, tokens))


START_UTILIZATION = 0.90

MACHINES = (Machine("llama-3.1-8b", "h200", StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9), 1_000_000),)

COEFFICIENTS = ("per_step", "per_token", "per_sequence", "per_context", "per_attended")
SIZES = (
    "kv_tokens",
    "device_bytes",
    "bytes_per_token",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_seqs_cap",
    "max_num_batched_tokens_cap",
    "max_model_len",
    "num_gpus",
)


def machine_of(model: str, gpu: str, calibration: Path | None = None) -> Machine:
    """Return the machine by name, or from a calibration file. Raise BadRequest for an unknown pair without a file."""
    known = next((m for m in MACHINES if (m.model, m.gpu) == (model.lower(), gpu.lower())), None)
    if calibration is not None:
        return read_calibration(calibration, model, gpu, known)
    if known is None:
        pairs = ", ".join(f"{m.model} on {m.gpu}" for m in MACHINES)
        raise BadRequest(
            f"no step times are known for {model} on {gpu} (known: {pairs}); give --calibration FILE with measured ones"
        )
    return known


def read_calibration(path: Path, model: str, gpu: str, base: Machine | None) -> Machine:
    """Read a JSON object with per_step, per_token, per_sequence, per_context in seconds, and sizes such as kv_tokens.

    Missing values are those of `base`, if known. `steps` instead of coefficients is a list of measured intervals:
    {steps, tokens, sequences, context, seconds}.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadCalibration(f"{path} cannot be read: {error.strerror}; give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise BadCalibration(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadCalibration(f"{path} is not a JSON object of coefficients and sizes")
    unknown = sorted(set(found) - {*COEFFICIENTS, *SIZES, "model", "gpu", "steps"})
    if unknown:
        raise BadCalibration(
            f"{path} has {', '.join(unknown)}; known are {', '.join((*COEFFICIENTS, *SIZES, 'steps'))}"
        )
    for name, requested in (("model", model), ("gpu", gpu)):
        if name in found and str(found[name]).lower() != requested.lower():
            raise BadCalibration(f"{path} is for {name} {found[name]}, not {requested}; use a matching --{name}")
    cost = _fitted(path, found["steps"]) if "steps" in found else _cost(path, found, base)
    sizes = {name: int(_number(path, found, name, least=1)) for name in SIZES if name in found}
    if base is None and "kv_tokens" not in sizes:
        raise BadCalibration(f"{path} lacks kv_tokens, and {model} on {gpu} has no default; add it")
    machine = base or Machine(model, gpu, cost, sizes["kv_tokens"])
    return replace(machine, model=model, gpu=gpu, cost=cost, **sizes)


def _cost(path: Path, found: dict[str, Any], base: Machine | None) -> StepCost:
    values = {}
    for name in COEFFICIENTS:
        if name in found:
            values[name] = _number(path, found, name, least=0.0)
        elif base is not None:
            values[name] = getattr(base.cost, name)
        elif name != "per_attended":
            raise BadCalibration(f"{path} lacks {name}; give all of {', '.join(COEFFICIENTS[:4])}, in seconds")
    cost = StepCost(**values)
    if cost.seconds(1, 1, 1, 1) <= 0:
        raise BadCalibration(f"{path}: a step takes no time; give per_step or per_token above 0")
    return cost


def _number(path: Path, found: dict[str, Any], name: str, *, least: float) -> float:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise BadCalibration(f"{path}: {name} is {value!r}; it must be a number of at least {least:g}")
    return value


def _fitted(path: Path, rows: Any) -> StepCost:
    """Return the non-negative least squares fit over measured intervals, each weighted by its length in steps."""
    names = ("steps", "tokens", "sequences", "context")
    if not isinstance(rows, list) or len(rows) < len(names) or not all(isinstance(row, dict) for row in rows):
        raise BadCalibration(f"{path}: steps must be a list of at least {len(names)} intervals")
    data = []
    for index, row in enumerate(rows):
        for name in (*names, "seconds"):
            if name not in row:
                raise BadCalibration(f"{path}: interval {index} lacks {name}")
        data.append(
            (
                [_number(path, row, name, least=0.0) for name in names],
                _number(path, row, "seconds", least=0.0),
            )
        )
    coefficients = fit_non_negative(data)
    if not any(coefficients):
        raise BadCalibration(f"{path}: no step time fits these intervals; give intervals with seconds above 0")
    return StepCost(*coefficients)


def fit_non_negative(data: list[tuple[list[float], float]]) -> list[float]:
    """Return non-negative coefficients with the least squared relative error, by cyclic coordinate descent."""
    count = len(data[0][0])
    rows = [([x / max(y, 1e-12) for x in xs], 1.0) for xs, y in data if y > 0]
    scale = [max((abs(xs[i]) for xs, _ in rows), default=0.0) or 1.0 for i in range(count)]
    gram = [[sum(xs[i] * xs[j] for xs, _ in rows) / scale[i] / scale[j] for j in range(count)] for i in range(count)]
    right = [sum(xs[i] for xs, _ in rows) / scale[i] for i in range(count)]
    found = [0.0] * count
    for _ in range(20_000):
        before = list(found)
        for i in range(count):
            if gram[i][i]:
                rest = right[i] - sum(gram[i][j] * found[j] for j in range(count) if j != i)
                found[i] = max(0.0, rest / gram[i][i])
        if max(abs(a - b) for a, b in zip(found, before, strict=True)) < 1e-12 * max(found):
            break
    return [value / scale[i] for i, value in enumerate(found)]
