"""Embeddings of the installed engine: command, API servers, real cores with a tiny random model, in several layouts."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

    Serve = Callable[..., RealEngine]

pytestmark = pytest.mark.usefixtures("forked")
TEXTS = [f"{word} is what they said " * (1 + number % 9) for number, word in enumerate("abcdefghijkl")]


def embed(engine: "RealEngine", **fields: Any) -> list[list[float]]:
    with openai.OpenAI(base_url=f"{engine.http.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS, **fields)
    assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
    return [one.embedding for one in answer.data]


def by_one_rank(model: Path, **keywords: Any) -> list[list[float]]:
    """Return vectors of an engine in this process."""
    from trimtab_engine import LLM

    with LLM(str(model), cpu_threads=1, max_model_len=256, num_gpu_blocks_override=40, **keywords) as llm:
        return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[float]]:
    return by_one_rank(tiny_model, load_format="dummy")


@pytest.mark.parametrize(
    "flags",
    [
        ("--data-parallel-size", "2", "--api-server-count", "2"),
        ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    ],
    ids=["dp2 with two servers", "tp2 pp2"],
)
def test_embeddings_equal_one_rank_during_generation(
    serve: "Serve", expected: list[list[float]], flags: tuple[str, ...]
) -> None:
    engine = serve(*flags)
    thread = threading.Thread(target=engine.texts)
    thread.start()
    found = embed(engine)
    thread.join()
    for vector, same in zip(found, expected, strict=True):
        assert vector == pytest.approx(same, abs=1e-5)
        assert math.hypot(*vector) == pytest.approx(1.0)
    if "--data-parallel-size" in flags:
        assert min(engine.metric("vllm:prompt_tokens_total").values()) > 0, "both cores serve"


def test_lockstep_cores_embed_like_one_rank(serve: "Serve", tiny_moe: Path) -> None:
    """Cores of a MoE model share the experts: a core without work computes padding."""
    engine = serve("--data-parallel-size", "2", "--enable-expert-parallel", model=tiny_moe)
    for vector, same in zip(embed(engine), by_one_rank(tiny_moe), strict=True):
        assert vector == pytest.approx(same, abs=1e-5)
