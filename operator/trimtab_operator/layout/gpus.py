"""Data of GPU models: memory, bandwidth, arithmetic and links.

Rates are the makers' published peaks (data sheets and architecture papers: B200, H200, H100 SXM, A100 SXM, L40S, L4,
GeForce RTX 4090 and 5090), arithmetic dense (without sparsity) and accumulated in float32, links in one direction. One
exception: B200's bandwidth is what its driver's bus width and clock give (7680 bit × 3996 MHz × 2, pytorch/ao#4002),
not the rounded 8 TB/s. Memory is not the marketing figure but the total that CUDA reports, as PyTorch prints it ("has
a total capacity of 139.80 GiB"): gpu_memory_utilization is a share of that. Where drivers differ, the smallest seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. Rates are per second, at their published peak."""

    name: str
    memory_bytes: int
    """Total device memory that CUDA reports."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    bf16_flops: float
    fp8_flops: float | None
    """None without fp8 arithmetic: fp8 weights are dequantised and multiplied at the bf16 rate."""
    link: Literal["NVLink", "PCIe"]
    """Link between the GPUs of one node."""
    link_bandwidth: float
    """Bytes per second that one GPU sends to the others of its node."""
    label: str
    """Value of the node label nvidia.com/gpu.product, set by GPU feature discovery."""


def _gpu(
    name: str,
    gib: float,
    bandwidth: float,
    bf16_teraflops: float,
    fp8_teraflops: float | None,
    link: Literal["NVLink", "PCIe"],
    link_gigabytes: float,
    label: str,
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=int(gib * GIB),
        bandwidth=bandwidth * TERA,
        bf16_flops=bf16_teraflops * TERA,
        fp8_flops=None if fp8_teraflops is None else fp8_teraflops * TERA,
        link=link,
        link_bandwidth=link_gigabytes * GIGA,
        label=label,
    )


GPUS: tuple[Gpu, ...] = (
    #    name       GiB     TB/s   bf16   fp8    link      GB/s  label
    _gpu("B200", 178.35, 7.67, 2250, 4500, "NVLink", 900, "NVIDIA-B200"),
    _gpu("H200", 139.80, 4.80, 989, 1979, "NVLink", 450, "NVIDIA-H200"),
    _gpu("H100", 79.18, 3.35, 989, 1979, "NVLink", 450, "NVIDIA-H100-80GB-HBM3"),
    _gpu("A100-80", 79.15, 2.039, 312, None, "NVLink", 300, "NVIDIA-A100-SXM4-80GB"),
    _gpu("A100-40", 39.38, 1.555, 312, None, "NVLink", 300, "NVIDIA-A100-SXM4-40GB"),
    _gpu("L40S", 44.34, 0.864, 362, 733, "PCIe", 32, "NVIDIA-L40S"),
    _gpu("L4", 22.03, 0.300, 121, 242, "PCIe", 32, "NVIDIA-L4"),
    _gpu("RTX-5090", 31.34, 1.792, 209.5, 419, "PCIe", 64, "NVIDIA-GeForce-RTX-5090"),
    _gpu("RTX-4090", 23.52, 1.008, 165.2, 330.3, "PCIe", 32, "NVIDIA-GeForce-RTX-4090"),
)


def gpu_named(name: str) -> Gpu:
    """Return the GPU of a name, ignoring case and separators.

    Raises:
        ValueError: The name is unknown; the message lists the known names.
    """
    wanted = re.sub(r"[\s_-]", "", name).lower()
    aliases = {"a100": "a10080", "a10080gb": "a10080", "a10040gb": "a10040", "4090": "rtx4090", "5090": "rtx5090"}
    wanted = aliases.get(wanted, wanted)
    for gpu in GPUS:
        if gpu.name.replace("-", "").lower() == wanted:
            return gpu
    raise ValueError(f"unknown GPU ({name!r}); use one of {', '.join(gpu.name for gpu in GPUS)}")


def gpu_of_label(product: str) -> Gpu | None:
    """Return the GPU of a node's label nvidia.com/gpu.product. None if it is unknown, shared or partitioned (MIG)."""
    return next((gpu for gpu in GPUS if gpu.label == product), None)
