"""Layouts of the installed engine: command, API server, real cores and ranks with a tiny random model."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import waiting

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

DEADLINE_SECONDS = 180.0  # generous: several processes each load torch on a possibly busy machine
DEATH_SECONDS = 60.0  # for a dead rank to stop the engine: usually a second, more on a busy machine
Serve = Callable[..., "RealEngine"]


@pytest.mark.usefixtures("forked")
def test_data_and_tensor_parallel_give_same_text_and_share_work(serve: Serve, expected: dict[str, str]) -> None:
    engine = serve("-dp", "2", "-tp", "2", "--api-server-count", "2")
    assert engine.texts() == expected
    layout = engine.layout()
    assert (layout["world_size"], layout["data_parallel_size"], layout["tensor_parallel_size"]) == (4, 2, 2)
    assert [(row["rank"], row["data"], row["tensor"]) for row in layout["ranks"]] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
    ]  # fmt: skip
    assert len({row["pid"] for row in layout["ranks"]}) == 4
    assert engine.metric("trimtab_layout_ranks") == {"0": 2.0, "1": 2.0}
    generated = engine.metric("vllm:generation_tokens_total")
    assert sum(generated.values()) == 20 * len(expected)
    assert min(generated.values()) >= 20 * 3, "four slots each: neither core had all"
    for family in ("vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds", "vllm:request_params_n"):
        served = engine.metric(family + "_count")
        assert {core: 20 * count for core, count in served.items()} == generated, "counted for the serving core"
    memory = engine.memory()
    assert [row["rank"] for row in memory["ranks"]] == [0, 1, 2, 3]
    assert memory["total"]["kinds"]["weights"] == sum(row["kinds"]["weights"] for row in memory["ranks"])
    assert memory["total"]["device_bytes"] == 4 * memory["device_bytes"]


@pytest.mark.parametrize(
    "flags",
    [
        ("-dp", "2"),
        ("-dp", "2", "--enable-expert-parallel"),
        ("-dp", "2", "-tp", "2", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin"),
        ("-dp", "2", "-pp", "2", "--enable-expert-parallel", "--api-server-count", "2"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("forked")
def test_moe_over_data_parallel_cores_equals_one_rank(
    flags: tuple[str, ...], serve: Serve, tiny_moe: Path, expected_of_moe: dict[str, str]
) -> None:
    engine = serve(*flags, model=tiny_moe)
    assert engine.texts() == expected_of_moe
    prompt = next(iter(expected_of_moe))
    assert engine.post(prompt).json()["choices"][0]["text"] == expected_of_moe[prompt], "other cores idle"
    experts = [tuple(row["experts"]) for row in engine.layout()["ranks"]]
    if "--enable-expert-parallel" in flags:
        num_stages = 2 if "-pp" in flags else 1
        held = sorted(expert for own in experts for expert in own)
        assert held == sorted(num_stages * list(range(6))), "each expert is held once in every stage"
    else:
        assert set(experts) == {tuple(range(6))}
    generated = engine.metric("vllm:generation_tokens_total")
    assert min(generated.values()) >= 20 * 3, "both cores served"


def test_request_can_choose_core_and_change_reaches_all(serve: Serve) -> None:
    engine = serve("-dp", "2")
    for _ in range(3):
        assert engine.post("a", rank="1").status_code == 200
    assert engine.metric("vllm:generation_tokens_total").get("0", 0.0) == 0.0
    wrong = engine.post("a", rank="2")
    assert (wrong.status_code, "use 0 to 1" in wrong.text) == (400, True)
    assert engine.admin.patch("/admin/v1/config", json={"max_num_seqs": 2}).status_code == 200
    engine.wait_for(
        lambda: engine.metric("trimtab_config_generation") == {"0": 2.0, "1": 2.0}, "the change in both cores"
    )


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-pp", "2")], ids=" ".join)
def test_killed_rank_stops_engine_with_its_name_and_5xx(flags: tuple[str, ...], serve: Serve) -> None:
    engine = serve(*flags)
    core = max(row["rank"] for row in engine.layout()["ranks"]) if flags[0] == "-pp" else 0
    victim = next(row for row in engine.layout()["ranks"] if row["rank"] != core)
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(engine.post("a", max_tokens=250)))
    running.start()
    engine.wait_for(lambda: engine.metric("vllm:num_requests_running") == {"0": 1.0}, "the request to run")
    os.kill(victim["pid"], signal.SIGKILL)
    assert engine.process.wait(DEATH_SECONDS) == 1
    running.join(DEADLINE_SECONDS)
    assert [answer.status_code // 100 for answer in answers] == [5]
    last = engine.log.read_text().strip().splitlines()[-1]
    assert re.fullmatch(
        rf"trimtab-engine: .*rank {victim['rank']} \(.*pid {victim['pid']}\) was killed by SIGKILL", last
    )
    waiting.until_gone([victim["pid"]])


@pytest.mark.usefixtures("forked")
def test_server_of_one_rank_numbers_it_globally(serve: Serve, tiny_moe: Path) -> None:
    engine = serve("-dp", "4", "--data-parallel-rank", "2")
    layout = engine.layout()
    assert (layout["world_size"], layout["data_parallel_size"], layout["data_parallel_rank"]) == (1, 4, 2)
    assert [(row["rank"], row["data"]) for row in layout["ranks"]] == [(2, 2)]
    assert engine.post("a", rank="2").status_code == 200
    assert "use 2 to 2" in engine.post("a", rank="0").text
    for family in ("vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count", "trimtab_layout_ranks"):
        assert list(engine.metric(family)) == ["2"]
    with pytest.raises(AssertionError, match="not supported for an MoE model, whose cores step together"):
        serve("-dp", "4", "--data-parallel-rank", "2", model=tiny_moe)
