"""The tuner's decisions: shapes, the pruned search, resuming. What it measures needs a GPU."""

import json
from pathlib import Path

import pytest
import torch
from trimtab_kernels.device_facts import H200
from trimtab_kernels.gemm_config import GemmConfig, load_configs
from trimtab_kernels.tune import Shape, best_of, deal, main, missing_batches, save, search_space, shapes_of

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_attention_heads": 128, "intermediate_size": 18432, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_shared_experts": 1, "moe_intermediate_size": 2048,
}  # fmt: skip


def test_shapes_come_from_the_models_config() -> None:
    assert shapes_of(LLAMA_8B) == [Shape(6144, 4096), Shape(4096, 4096), Shape(28672, 4096), Shape(4096, 14336)]
    assert shapes_of(LLAMA_8B, 8)[0] == Shape(768, 4096)
    assert shapes_of(LLAMA_8B, 16)[0] == Shape((32 + 2 * 16) * 128 // 16, 4096), "kv heads are repeated beyond 8 ranks"
    assert shapes_of(DEEPSEEK_V3, 8) == [
        Shape(2112, 7168), Shape(3072, 1536), Shape(4096, 512), Shape(7168, 2048),
        Shape(4608, 7168), Shape(7168, 2304), Shape(512, 7168), Shape(7168, 256),
    ]  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
def test_the_search_is_pruned_and_has_the_default(num_tokens: int) -> None:
    space = search_space(num_tokens, Shape(4096, 4096), H200)
    assert 50 < len(space) < 1280, "fewer than the plain grid"
    assert len(set(space)) == len(space)
    assert all(config.operand_bytes <= H200.shared_bytes and 128 % config.block_k == 0 for config in space)
    assert num_tokens > 1 or all(config.block_m <= 32 for config in space)


def test_the_fastest_that_can_be_launched_wins() -> None:
    configs = [GemmConfig(m, 64, 128, 1, 4, 2) for m in (16, 32, 64)]
    assert best_of(configs, lambda c: None if c.block_m == 16 else c.block_m / 1000) == (configs[1], 0.032)
    assert best_of(configs, lambda _: None) is None


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    config = GemmConfig(16, 64, 128, 1, 4, 2, 4)
    assert missing_batches(path, [1, 64]) == [1, 64]
    save(path, 64, config)
    save(path, 8, config)
    assert missing_batches(path, [1, 8, 64]) == [1]
    assert list(json.loads(path.read_text())) == ["8", "64"]
    assert load_configs("shape.json", tmp_path) == {8: config, 64: config}


def test_numbers_of_tokens_are_dealt_out_evenly() -> None:
    shares = deal([4096, 1024, 64, 8, 1], 2)
    assert shares == [[4096, 64, 1], [1024, 8]]


def test_without_a_gpu_it_says_so_and_a_dry_run_still_tells_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main([str(tmp_path), "--dry-run", "--batch-size", "1", "64"]) == 0
    assert "N=6144 K=4096" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main([str(tmp_path)]) == 2
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "flags", "told"),
    [
        (None, (), "No such file or directory; give a folder with a config.json"),
        ("{", (), "is not a model's config.json: "),
        ("[]", (), "is not a model's config.json: "),
        ('{"hidden_size": 64}', (), "has no num_attention_heads; the config.json of a model is needed"),
        (json.dumps(LLAMA_8B), ("--tensor-parallel-size", "3"), "3 does not divide num_attention_heads 32"),
    ],
)
def test_a_model_that_cannot_be_tuned_for_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, flags: tuple[str, ...], told: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main([str(tmp_path), "--dry-run", *flags]) == 2
    line = capsys.readouterr().err
    assert line.startswith("tune: ")
    assert told in line


def test_no_tokens_are_no_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--batch-size", "1", "0"])
    assert "'0' is no whole number of 1 or more" in capsys.readouterr().err
