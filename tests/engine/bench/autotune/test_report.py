"""Outputs of a search: a table, JSON, a page and a patch."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from synthetic_engine import SyntheticEngine
from trimtab_engine.bench.autotune.limits import Limits
from trimtab_engine.bench.autotune.page import page
from trimtab_engine.bench.autotune.patch import resource_patch
from trimtab_engine.bench.autotune.report import as_json, estimate_num_runs, found, progress_line, table
from trimtab_engine.bench.autotune.search import Search
from trimtab_engine.bench.autotune.space import Candidate, Setting, Space
from trimtab_engine.bench.autotune.state import Run, run_from_json
from trimtab_operator.resource.spec import Spec

SAMPLE = Path(__file__).parents[4] / "config" / "samples" / "smollm2-cpu.yaml"
FACTS = {"model": "a <model>", "load": "100 random prompts a run"}
SETTING = Setting(Candidate(64, 2048), 0.93)


def make_search(limits: Limits, engine: SyntheticEngine | None = None) -> tuple[Search, list[Run]]:
    """Return a complete search, and its runs."""
    engine = engine or SyntheticEngine(most_utilization=0.93)
    search, runs = Search(Space((8, 32, 128), (512, 2048, 8192), (90, 98)), limits), []
    steps = search.steps()
    trial = next(steps)
    while True:
        runs.append(Run(trial, engine.answer(trial), 2.0))
        try:
            trial = steps.send(runs[-1].seen)
        except StopIteration:
            return search, runs


@pytest.fixture(scope="module")
def done() -> tuple[Search, list[Run]]:
    return make_search(Limits.parse(["ttft:400"]))


def test_table_has_candidates_best_and_rejected_values(done: tuple[Search, list[Run]]) -> None:
    output = table(done[0], FACTS, done[1])
    assert "gpu_memory_utilization: 0.93 is the largest working value (0.94: out of memory" in output
    assert sum(line.lstrip()[:1].isdigit() for line in output.splitlines()) == 9
    assert "<- best" in output
    assert "limits: TTFT p99 <= 400 ms" in output
    assert "Final run" in output


def test_json_has_table_values_and_every_run(done: tuple[Search, list[Run]]) -> None:
    search, runs = done
    body = json.loads(json.dumps(as_json(search, FACTS, runs)))
    setting = found(search)
    assert setting is not None
    assert body["found"] == setting.values
    assert [run_from_json(run) for run in body["runs"]] == runs
    assert len(body["candidates"]) == 9


def test_unconfirmed_values_are_not_in_the_patch() -> None:
    search, runs = make_search(Limits.parse(["e2el:1"]))
    assert found(search) is None
    assert "No candidate meets the limits. The closest is" in table(search, FACTS, runs)
    assert as_json(search, FACTS, runs)["found"] is None


def test_interrupted_search_reports_its_results() -> None:
    search = Search(Space((8,), (512,), (90, 98)), Limits())
    assert "no value works" in table(search, FACTS, [])
    assert "<table>" in page(search, FACTS, [], None)


class Tags(HTMLParser):
    """Opened and closed tags must match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle"):
            assert self.open.pop() == tag


def test_page_is_complete_and_escaped(done: tuple[Search, list[Run]]) -> None:
    html = page(done[0], FACTS, done[1], "spec: {}\n")
    tags = Tags()
    tags.feed(html)
    assert {"svg", "circle", "table", "pre"} <= tags.seen
    assert tags.open == []
    assert "a &lt;model&gt;" in html
    assert "stroke-dasharray" in html


@pytest.mark.parametrize("name", [None, "smollm2"])
def test_patch_applies_values_to_the_sample(name: str | None) -> None:
    text = resource_patch(SETTING, name=name, namespace="prod" if name else None, about="how\nit was found")
    patch = yaml.safe_load(text)
    resource: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    resource["spec"]["tuning"] = {"mode": "Off"}
    resource["spec"]["engine"] |= patch["spec"]["engine"]
    engine = Spec.model_validate(resource["spec"]).engine
    assert (engine.gpu_memory_utilization, engine.max_num_seqs, engine.max_num_batched_tokens) == (
        "0.93",
        64,
        2048,
    )
    assert ("kubectl apply --server-side" in text) == (name is not None)
    assert (patch.get("metadata") == {"name": "smollm2", "namespace": "prod"}) == (name is not None)


def test_progress_line_has_position_and_remaining_time(done: tuple[Search, list[Run]]) -> None:
    search, runs = done
    likely = estimate_num_runs(search.space, search.limits)
    line = progress_line(runs[-1], search.limits, done=5, likely=likely, elapsed=75, per_run=10)
    assert line.startswith(f"[5/~{likely}, 1 min 15 s, about ")
    assert "final profile" in line
    assert progress_line(runs[0], search.limits, done=99, likely=9, elapsed=1, per_run=10).startswith("[99/~100,")
