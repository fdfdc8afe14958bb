"""GPUs by name and by label."""

from __future__ import annotations

import pytest
from trimtab_operator.layout.gpus import GIB, GPUS, gpu_named, gpu_of_label


@pytest.mark.parametrize("name", ["H200", "h200", "A100-80", "a100 80gb", "A100", "rtx4090", "RTX-4090", "4090"])
def test_a_gpu_is_found_by_its_name_however_it_is_written(name: str) -> None:
    assert gpu_named(name) in GPUS


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"\('H300'\); use one of B200, H200, H100"):
        gpu_named("H300")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA-H200", "H200"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", None),
        ("NVIDIA-H200-SHARED", None),
        ("", None),
    ],
)
def test_a_nodes_label_names_a_whole_gpu_or_nothing(label: str, name: str | None) -> None:
    gpu = gpu_of_label(label)
    assert (gpu.name if gpu is not None else None) == name


def test_the_table_is_plausible() -> None:
    """Slips of a unit would be orders of magnitude away from this."""
    assert len({gpu.name for gpu in GPUS}) == len({gpu.label for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert 20 * GIB < gpu.memory_bytes < 200 * GIB
        assert 0.2e12 < gpu.bandwidth < 10e12
        assert 1e14 < gpu.bf16_flops < 3e15
        assert gpu.fp8_flops is None or 1.9 < gpu.fp8_flops / gpu.bf16_flops < 2.1
        assert 30e9 <= gpu.link_bandwidth <= 900e9
        assert (gpu.link == "NVLink") == (gpu.link_bandwidth > 100e9)
