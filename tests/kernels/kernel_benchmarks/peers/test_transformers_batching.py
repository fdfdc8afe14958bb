"""transformers' continuous batching on the CPU with a tiny model."""

from typing import Any

import pytest
from kernel_benchmarks.engine_rows import EngineRow, Kind, Workload
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.peers.transformers_batching import TransformersBatching
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

TINY = ModelShape("tiny", 2, 64, 96, 4, 2, 16, 10_001, False, False)
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # transformers 5.17's name
SMALL: dict[str, Any] = {PAGE: 16, "num_blocks": 64, "max_batch_tokens": 128}
"""Its cache, which it would otherwise size by the machine's memory."""
PROMPTS = [[5, 6, 7, 8, 9], [11] * 20, [12, 13]]

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # warnings of another project's code
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> TransformersBatching:
    return TransformersBatching(TINY, tmp_path_factory.mktemp("model"), device="cpu", **SMALL)


def test_generate_equals_generate_batch_with_requested_lengths(
    served: TransformersBatching,
) -> None:
    generation: Any = GenerationConfig
    expected = served.model.generate_batch(
        PROMPTS,
        generation_config=generation(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, **SMALL),
    )
    counts = [6, 3, 5]
    _, outputs = served.generate(list(zip(PROMPTS, counts, strict=True)))
    for output, whole, count in zip(outputs, expected.values(), counts, strict=True):
        assert output.generated_tokens == whole.generated_tokens[:count]
        assert len(output.timestamps) == count


@pytest.mark.parametrize("kind", [Kind.DECODE, Kind.PREFILL, Kind.WORKLOAD])
def test_every_kind_of_row_has_a_rate(
    served: TransformersBatching, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    load: Workload = [(prompt, 1 if kind is Kind.PREFILL else 12) for prompt in PROMPTS]
    monkeypatch.setattr(EngineRow, "load", property(lambda row: load))
    assert served.rate(EngineRow(TINY, kind, 0.5, len(PROMPTS))) > 0
