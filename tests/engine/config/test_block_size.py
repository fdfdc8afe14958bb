"""Blocks of every size: the same tokens; and the size that auto means for a model."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import engine_builders
import pytest
from served import greedy_requests, serve
from trimtab_engine.cli import _parser
from trimtab_engine.config.engine import BLOCK_SIZES
from trimtab_engine.core.engine import Engine
from trimtab_engine.errors import ModelError
from trimtab_engine.flags.engine import engine_config


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    return model_of(vocab_size=128, max_position_embeddings=600)


an_engine = partial(engine_builders.an_engine, block_size=16, max_num_seqs=4, max_num_batched_tokens=48)


def run(engine: Engine) -> dict[str, list[int]]:
    return serve(
        engine, greedy_requests(([(11 * n + 3 * i) % 127 for i in range(5 + 90 * n)] for n in range(4)), 20)
    ).tokens


def test_every_size_gives_the_same_tokens(model: Path) -> None:
    answers = [run(an_engine(model, block_size=size, num_gpu_blocks_override=2400 // size)) for size in BLOCK_SIZES]
    assert all(answer == answers[0] for answer in answers)


def parsed(*flags: str) -> argparse.Namespace:
    return _parser().parse_args(["serve", *flags])


@pytest.mark.parametrize("flags", [(), ("--max-model-len", "auto")])
def test_auto_reads_the_models_longest_request(model: Path, flags: tuple[str, ...]) -> None:
    arguments = parsed(str(model), "--load-format", "dummy", "--device", "cpu", "--block-size", "auto", *flags)
    assert engine_config(arguments).block_size == 64  # 600 tokens: 1024 / 16


def test_auto_needs_a_model_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        engine_config(parsed(str(tmp_path / "missing"), "--device", "cpu", "--block-size", "auto"))
