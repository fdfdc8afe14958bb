"""Fake CUDA rank groups: nothing is sent; sends are recorded, with whether they are part of a graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calling_recorder import CallingRecorder
from trimtab_engine.parallel.groups import RankGroup, RankGroups, WireMeter
from trimtab_engine.parallel.ranks import Layout


@contextmanager
def a_fake_nccl(recorder: CallingRecorder) -> Iterator[list[tuple[str, bool]]]:
    """Yield the recorded collectives and whether each is in a graph. Nothing is computed."""
    calls: list[tuple[str, bool]] = []

    def noting(name: str) -> Any:
        def note(*tensors: Any, **_: Any) -> None:
            assert all(t.is_cuda for t in tensors if isinstance(t, torch.Tensor)), f"{name} through host memory"
            calls.append((name, recorder.is_recording))

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_backend", lambda group: "nccl")
        for name in ("all_reduce", "broadcast", "gather", "send", "recv"):
            patch.setattr(f"torch.distributed.{name}", noting(name))
        for name in ("_all_gather", "_reduce_scatter"):
            patch.setattr(f"trimtab_engine.parallel.groups.{name}", noting(name.removeprefix("_")))
        yield calls


def groups_of(layout: Layout, rank: int) -> RankGroups:
    """Return groups as join_groups makes them, without other members. Use inside a_fake_nccl()."""
    meter = WireMeter()

    def own(groups: tuple[tuple[int, ...], ...]) -> RankGroup | None:
        ranks = next(ranks for ranks in groups if rank in ranks)
        nobody: Any = None
        return RankGroup(nobody, ranks, rank, meter) if len(ranks) > 1 else None

    return RankGroups(
        tensor=own(layout.tensor_groups()),
        pipeline=own(layout.pipeline_groups()),
        data=own(layout.data_groups()),
        meter=meter,
    )
