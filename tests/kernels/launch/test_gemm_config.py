"""Measured configurations by shape and nearest M; otherwise a rule and one warning."""

import json
import logging
from pathlib import Path

import pytest
from trimtab_kernels.launch.device_facts import TARGETS, DeviceFacts
from trimtab_kernels.launch.gemm_config import GemmConfig, config_file_name, default_config, load_configs, nearest

CONFIG = GemmConfig(16, 64, 128, 16, 4, 3, 4)


def test_config_file_names_equal_vllms() -> None:
    assert config_file_name(4096, 7168, "NVIDIA_H200") == (
        "N=4096,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    )
    assert config_file_name(768, 2048, "NVIDIA_H200", num_experts=128, dtype="bfloat16") == (
        "E=128,N=768,K=2048,device_name=NVIDIA_H200,dtype=bfloat16.json"
    )


def test_load_configs_reads_saved_file(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps({"1": CONFIG.to_json(), "64": CONFIG.to_json()}))
    assert load_configs("file.json", tmp_path) == {1: CONFIG, 64: CONFIG}


def test_missing_config_file_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_configs("none.json", tmp_path) is None
        assert load_configs("none.json", tmp_path) is None
    assert len(caplog.records) == 1
    assert "trimtab_kernels.tune" in caplog.text


@pytest.mark.parametrize(("num_tokens", "m"), [(1, 1), (5, 1), (33, 64), (9999, 1024)])
def test_nearest_number_of_tokens_is_selected(num_tokens: int, m: int) -> None:
    configs = {m: GemmConfig(m, 64, 128, 16, 4, 3) for m in (1, 64, 1024)}
    assert nearest(configs, num_tokens).block_m == m


@pytest.mark.parametrize("facts", TARGETS)
@pytest.mark.parametrize("itemsize", [1, 2])
def test_default_configs_fit_shared_memory_of_every_target(facts: DeviceFacts, itemsize: int) -> None:
    for num_tokens in (1, 17, 64, 128, 4096):
        config = default_config(num_tokens, 4096, 4096, facts, itemsize=itemsize)
        assert config.operand_bytes * itemsize <= facts.shared_bytes


def test_few_tokens_use_split_k_to_fill_device() -> None:
    h200 = TARGETS[2]
    assert default_config(1, 4096, 4096, h200).split_k == 8
    assert default_config(4096, 4096, 4096, h200).split_k == 1
    assert default_config(1, 4096, 256, h200).split_k == 1, "K is too short to share"
