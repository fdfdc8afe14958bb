"""Rank groups: byte counts, graph capture support, and eager connections."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from trimtab_engine.parallel import groups
from trimtab_engine.parallel.groups import RankGroup, RankGroups, WireMeter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_separately_counted_bytes_are_excluded() -> None:
    meter = WireMeter()
    meter.add("all_reduce", 5)
    with meter.apart() as inside:
        meter.add("all_reduce", 7)
        meter.add("gather", 1)
    meter.add("all_reduce", 2)
    assert inside == {"all_reduce": 7, "gather": 1}
    assert meter.take() == {"all_reduce": 7}
    meter.add_all(inside)
    assert meter.take() == inside


def a_group(monkeypatch: pytest.MonkeyPatch, backend: str) -> RankGroup:
    nobody: Any = None
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    return RankGroup(nobody, (0, 1), 0, WireMeter())


@pytest.mark.parametrize(
    ("backend", "device", "can"), [("nccl", CUDA, True), ("gloo", CUDA, False), ("gloo", CPU, True)]
)
def test_collectives_through_host_memory_cannot_be_captured(
    backend: str, device: torch.device, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = a_group(monkeypatch, backend)
    assert RankGroups(tensor=group).can_capture(device) is can
    assert RankGroups(data=group).can_capture(device) is can
    assert RankGroups(pipeline=group).can_capture(device), "transfers between stages are in no graph"


@pytest.mark.parametrize(("stage", "passing"), [(0, ["send"]), (1, ["recv", "send"]), (2, ["recv"])])
def test_connect_opens_all_connections_uncounted(
    stage: int, passing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("all_reduce", "broadcast", "gather", "send", "recv"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: made.append(name))
    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(groups, f"_{name}", lambda *_, name=name, **__: made.append(name))
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    nobody: Any = None
    meter = WireMeter()
    tensor = RankGroup(nobody, (2 * stage, 2 * stage + 1), 2 * stage, meter)
    RankGroups(tensor=tensor, pipeline=RankGroup(nobody, (0, 2, 4), 2 * stage, meter), meter=meter).connect(CPU)
    assert made == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather", *passing]
    assert meter.take() == {}
