"""Device limits, measured at the start of each run: bytes/s, and FLOP/s of large GEMMs.

`python -m kernel_benchmarks.limits` starts a run and writes the device, the versions and these limits to the report.
"""

import argparse
import platform
import sys
from collections.abc import Callable
from functools import partial

import torch
from trimtab_kernels.launch.jit import HAS_TRITON, triton

from kernel_benchmarks.phase import DONE, NO_GPU, parse_phase
from kernel_benchmarks.report import Entry
from kernel_benchmarks.timing import seconds_of

COPY_BYTES = 1 << 31
SIDE = 8192
"""Side of the square GEMMs. Random values: zeros draw less power and run faster."""
DATA_SHEET = {"H100": 990e12, "H200": 990e12}
"""FLOP/s of dense bf16 GEMMs from the vendor's data sheet: the target of prefill attention is a share of it."""


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written per second by a copy."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: destination.copy_(source), device)


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes read per second by a sum: the cost of weights that are read once."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    return COPY_BYTES / seconds_of(source.sum, device)


def bf16_rate(device: torch.device) -> float:
    """Return the FLOP/s of a bf16 GEMM."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * SIDE**3 / seconds_of(lambda: torch.mm(a, b), device))


def fp8_rate(device: torch.device, *, is_fast: bool = True) -> float:
    """Return the FLOP/s of a float8 GEMM with one scale, summed in the matrix unit's own precision (`is_fast`) or moved
    to float32 sums every few steps.

    Raises:
        RuntimeError: the GPU has no float8.
    """
    a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    call = lambda: torch._scaled_mm(  # noqa: E731
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )
    return float(2 * SIDE**3 / seconds_of(call, device))


LIMITS: dict[str, Callable[[torch.device], float]] = {
    "copy": copy_bandwidth,
    "read": read_bandwidth,
    "bf16": bf16_rate,
    "fp8": fp8_rate,
    "fp8 precise": partial(fp8_rate, is_fast=False),
}


def measure_limits(device: torch.device, log: Callable[[str], None]) -> dict[str, float]:
    """Measure every limit by name. Reads count at least as fast as copies: a library's sum may be slower."""
    limits: dict[str, float] = {}
    for name, measure in LIMITS.items():
        try:
            limits[name] = measure(device)
        except RuntimeError as error:  # float8 before Ada
            log(f"limit {name}: not measured, {str(error)[:120]}")
            continue
        log(f"limit {name}: {limits[name] / 1e12:.3g} T/s")
    limits["read"] = max(limits.get("read", 0.0), limits["copy"])
    return limits | data_sheet(torch.cuda.get_device_name(device))


def data_sheet(device_name: str) -> dict[str, float]:
    """Return the limit `sheet` of a device whose data sheet is known."""
    rates = [rate for name, rate in DATA_SHEET.items() if name in device_name]
    return {"sheet": rates[0]} if rates else {}


def identity(device: torch.device, triton_version: str) -> Entry:
    """Return the device and versions of a measurement: rows of other devices or versions are not mixed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, or 2 without a GPU or Triton, and then write nothing."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks.limits", description=__doc__.split("\n")[0])
    parser.add_argument("--command", default="python -m kernel_benchmarks.limits", help="command name in the report")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run on this device")
    parser.add_argument("--at-end", action="store_true", help="measure again after the rows, to report the drift")
    phase = parse_phase(parser, arguments)
    if not torch.cuda.is_available() or not HAS_TRITON:
        print("bench-gpu: needs a CUDA device, torch with CUDA and triton; nothing was measured", file=sys.stderr)
        return NO_GPU
    device, report = torch.device("cuda"), phase.report
    if phase.rest.at_end:
        report.limits_at_end = measure_limits(device, phase.clock.log)
    else:
        report.start(
            identity(device, triton.__version__), phase.rest.command, keep_rows=phase.rest.resume, only=phase.only
        )
        report.limits = measure_limits(device, phase.clock.log)
    report.write()
    return DONE


if __name__ == "__main__":
    sys.exit(main())
