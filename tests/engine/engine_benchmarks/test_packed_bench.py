"""Time per decoded token from disturbed rounds, and the number of threads."""

from collections.abc import Iterator
from pathlib import Path

import engine_benchmarks.packed_bench as packed_bench
import pytest
import torch
from engine_benchmarks.packed_bench import NOTHING, STEPS, Spent, Timed, of_one_token, time_alternately, trimtab
from engine_benchmarks.random_checkpoint import CONFIG, write


def a_round(before: float, whole: float) -> Timed:
    return Timed(Spent(before, before / 2), Spent(whole, whole / 2))


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_disturbed_prompt_time_makes_no_token_faster() -> None:
    rounds = [a_round(900.0, 1.0 + STEPS), a_round(1.0, 1.0 + 2 * STEPS), a_round(1.5, 1.5 + STEPS)]
    assert of_one_token(rounds) == Spent(1.0, 0.5)


def test_contenders_alternate_and_first_round_is_not_counted() -> None:
    requested: list[str] = []

    def contender(name: str, *wholes: float) -> packed_bench.Round:
        left = list(wholes)

        def run() -> Timed:
            requested.append(name)
            return Timed(NOTHING, Spent(left.pop(0) * STEPS, 0.0))

        return run

    best = time_alternately({"a": contender("a", 0.1, 3.0, 2.0), "b": contender("b", 9.0, 4.0, 5.0)}, 2)
    assert requested == ["a", "b"] * 3
    assert {name: spent.wall for name, spent in best.items()} == {"a": 2.0, "b": 4.0}


def test_model_uses_requested_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "vocab_size": 97}
    monkeypatch.setattr("engine_benchmarks.random_checkpoint.CONFIG", CONFIG | sizes)
    monkeypatch.setattr(packed_bench, "native_library", lambda: None)  # possibly not compiled here
    write(tmp_path / "made", 1)
    run, _ = trimtab(tmp_path / "made", [5, 6, 7], threads=3)
    assert torch.get_num_threads() == 3
    assert run().whole.wall > 0
