"""The tuner's selection, time budget and resumption. Measurements themselves need a GPU."""

import json
import time
from pathlib import Path

import pytest
import torch
from trimtab_kernels.launch.device_facts import H200
from trimtab_kernels.launch.gemm_config import GemmConfig, load_configs
from trimtab_kernels.tune import measurement as tune
from trimtab_kernels.tune.compile_ahead import CompileAhead
from trimtab_kernels.tune.gemm_search import Shape
from trimtab_kernels.tune.measurement import best_of, distribute, main, missing_batches, save, until

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}


def test_best_of_selects_fastest_launchable() -> None:
    configs = [GemmConfig(m, 64, 128, 1, 4, 2) for m in (16, 32, 64)]
    assert best_of(configs, lambda c: None if c.block_m == 16 else c.block_m / 1000) == (configs[1], 0.032)
    assert best_of(configs, lambda _: None) is None


def test_run_resumes_with_missing_batches(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    config = GemmConfig(16, 64, 128, 1, 4, 2, 4)
    assert missing_batches(path, [1, 64]) == [1, 64]
    save(path, 64, config)
    save(path, 8, config)
    assert missing_batches(path, [1, 8, 64]) == [1]
    assert list(json.loads(path.read_text())) == ["8", "64"]
    assert load_configs("shape.json", tmp_path) == {8: config, 64: config}


def test_batch_sizes_are_distributed_evenly() -> None:
    shares = distribute([4096, 1024, 64, 8, 1], 2)
    assert shares == [[4096, 64, 1], [1024, 8]]


def test_without_gpu_reports_error_and_dry_run_prints_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main([str(tmp_path), "--dry-run", "--batch-size", "1", "64"]) == 0
    assert "N=6144 K=4096" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main([str(tmp_path)]) == 2
        assert "no CUDA device" in capsys.readouterr().err


def test_expired_budget_times_only_default() -> None:
    configs = [GemmConfig(m, 64, 128, 1, 4, 2) for m in (16, 32, 64)]
    assert list(until(time.monotonic() - 1, configs)) == configs[:1]
    assert list(until(float("inf"), configs)) == configs
    assert list(until(float("inf"), [])) == []


def test_uncompiled_configurations_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[GemmConfig] = []

    class Ahead(CompileAhead):
        def __init__(self) -> None:
            """Compiles the first ten items in time, without processes."""

        def run(self, task: object, items: object, seconds: float) -> list[object]:  # type: ignore[override]
            requested.extend(config for _, config in items)  # type: ignore[attr-defined]
            return list(items)[:10]  # type: ignore[call-overload, no-any-return]

    found = tune._candidates(Ahead(), Shape(4096, 4096), [1, 4096], H200, 5.0)
    assert set(found) == {1, 4096}
    compiled = set(requested[:10])
    for configs in found.values():
        assert set(configs[1:]) <= compiled
    assert requested[:2] == [configs[0] for configs in found.values()], "defaults come first"


def test_configuration_is_compiled_as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab_kernels.w8a8_block_fp8 import _w8a8_block_fp8

    warmed: list[dict[str, object]] = []

    class Function:
        arg_names = _w8a8_block_fp8.function.arg_names

        def warmup(self, **arguments: object) -> None:
            warmed.append(arguments)

    monkeypatch.setattr(_w8a8_block_fp8, "function", Function())
    tune._compile((Shape(256, 512), GemmConfig(32, 64, 128, 1, 4, 3, 2)))
    (product,) = warmed
    chosen = {"N": 256, "K": 512, "BLOCK_M": 32, "SPLIT_K": 2, "num_warps": 4, "num_stages": 3}
    assert chosen.items() <= product.items()
    assert product["b"].dtype == torch.float8_e4m3fn  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        (None, (), "No such file or directory; give a folder with a config.json"),
        ("{", (), "is not a model's config.json: "),
        ("[]", (), "is not a model's config.json: "),
        ('{"hidden_size": 64}', (), "has no num_attention_heads; the config.json of a model is needed"),
        (json.dumps(LLAMA_8B), ("--tensor-parallel-size", "3"), "3 does not divide num_attention_heads 32"),
    ],
)
def test_unsupported_model_exits_with_code_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, flags: tuple[str, ...], expected: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main([str(tmp_path), "--dry-run", *flags]) == 2
    line = capsys.readouterr().err
    assert line.startswith("tune: ")
    assert expected in line


def test_zero_tokens_are_rejected_as_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--batch-size", "1", "0"])
    assert "'0' is no whole number of 1 or more" in capsys.readouterr().err
