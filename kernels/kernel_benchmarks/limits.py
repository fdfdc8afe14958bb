"""What the device can do, measured at the start of each run: bytes/s, and FLOP/s of large matrix products.

`python -m kernel_benchmarks.limits` begins a run: which device and versions, and these limits, go into the report.
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
"""Of the square products. Random values: zeros draw less power and run faster."""
DATA_SHEET = {"H100": 990e12, "H200": 990e12}
"""FLOP/s of dense bf16 products by the vendor's data sheet: the bar of prefill attention is a share of it."""


def copy_bandwidth(device: torch.device) -> float:
    """Read and written bytes per second."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: destination.copy_(source), device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that are only read, by a sum: what weights cost that are read once."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    return COPY_BYTES / seconds_of(source.sum, device)


def bf16_rate(device: torch.device) -> float:
    """FLOP/s of a bf16 product."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * SIDE**3 / seconds_of(lambda: torch.mm(a, b), device))


def fp8_rate(device: torch.device, *, is_fast: bool = True) -> float:
    """FLOP/s of a float8 product with one scale, summed in the matrix unit's own precision (`is_fast`) or moved to
    float32 sums every few steps. Raises RuntimeError where the GPU has no float8."""
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


def measured(device: torch.device, say: Callable[[str], None]) -> dict[str, float]:
    """Every limit by name. What is read counts at least as fast as what is copied: a library's sum may be slower."""
    limits: dict[str, float] = {}
    for name, measure in LIMITS.items():
        try:
            limits[name] = measure(device)
        except RuntimeError as error:  # float8 before Ada
            say(f"limit {name}: not measured, {str(error)[:120]}")
            continue
        say(f"limit {name}: {limits[name] / 1e12:.3g} T/s")
    limits["read"] = max(limits.get("read", 0.0), limits["copy"])
    return limits | data_sheet(torch.cuda.get_device_name(device))


def data_sheet(device_name: str) -> dict[str, float]:
    """The limit `sheet` of a device whose data sheet is known."""
    rates = [rate for name, rate in DATA_SHEET.items() if name in device_name]
    return {"sheet": rates[0]} if rates else {}


def identity(device: torch.device, triton_version: str) -> Entry:
    """Where a figure was measured: rows of another device or version are not mixed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 without a GPU or Triton: then nothing is written."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks.limits", description=__doc__.split("\n")[0])
    parser.add_argument("--command", default="python -m kernel_benchmarks.limits", help="as the report shall name it")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run on this device")
    parser.add_argument("--at-end", action="store_true", help="measure again behind the rows: what has drifted since")
    phase = parse_phase(parser, arguments)
    if not torch.cuda.is_available() or not HAS_TRITON:
        print("bench-gpu: needs a CUDA device, torch with CUDA and triton; nothing was measured", file=sys.stderr)
        return NO_GPU
    device, report = torch.device("cuda"), phase.report
    if phase.rest.at_end:
        report.limits_at_end = measured(device, phase.clock.say)
    else:
        report.start(
            identity(device, triton.__version__), phase.rest.command, keep_rows=phase.rest.resume, only=phase.only
        )
        report.limits = measured(device, phase.clock.say)
    report.write()
    return DONE


if __name__ == "__main__":
    sys.exit(main())
