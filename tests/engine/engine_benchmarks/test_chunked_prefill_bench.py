"""The max_num_batched_tokens benchmark on a tiny model: the number of steps depends on the budget."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_benchmarks import chunked_prefill_bench as bench
from trimtab_engine import LLM
from trimtab_engine.bench.serving.samples import Words


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        str(tiny_model),
        load_format="dummy",
        device="cpu",
        cpu_threads=1,
        max_model_len=256,
        num_gpu_blocks_override=100,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    ) as llm:
        yield llm


def test_smaller_budget_spreads_prompt_over_more_steps(
    llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab_engine.text.tokenizer import Tokenizer

    monkeypatch.setattr(bench, "LONG_PROMPT", 120)
    words = Words(Tokenizer(str(tiny_model)), seed=0)
    large = bench.interrupted_streams(llm, words)
    assert large["steps"] == 2  # 60 tokens of it with four that decode
    llm.patch_config(max_num_batched_tokens=24)
    small = bench.interrupted_streams(llm, words)
    assert small["steps"] == 6  # 20 with four
    assert large["ttft_ms"] >= large["longest_itl_ms"] > 0
    assert bench.batch_seconds(llm, words) > 0
    assert not llm.engine.has_work
