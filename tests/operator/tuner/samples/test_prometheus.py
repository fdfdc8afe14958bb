"""PromQL queries, parsing of Prometheus' responses into metrics pages, and their errors."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import pytest
from fake_prometheus import exposed
from trimtab_operator.tuner.samples.prometheus import (
    DuplicateTargets,
    PrometheusNaming,
    StoredSeries,
    group_scrapes,
    newest_page,
    parse_clock,
    parse_matrix,
    range_query,
)
from trimtab_operator.tuner.samples.series import USED_NAMES, Unreadable, sample_of
from tuner_snapshots import make_sample

INSTALLED = PrometheusNaming(
    pod="kubernetes_pod_name",
    namespace="kubernetes_namespace",
    matchers={"cluster": "eu"},
    aliases={"vllm:time_to_first_token_seconds": "vllm_ttft", "trimtab_config_generation": "trimtab:generation"},
)


def parsed(query: str) -> promql_parser.MatrixSelector:
    found = promql_parser.parse(query)
    assert isinstance(found, promql_parser.MatrixSelector)
    return found


def matchers(query: str) -> dict[str, tuple[Any, str]]:
    return {m.name: (m.op, m.value) for m in parsed(query).vector_selector.matchers.matchers}


def test_range_query_is_promql_for_all_families_of_the_pods() -> None:
    query = range_query(PrometheusNaming(), namespace="team-a", pods=["m-g1-0", "m-g0-0"], seconds=44.2)
    assert parsed(query).range.total_seconds() == 45
    found = matchers(query)
    assert found["namespace"] == (promql_parser.MatchOp.Equal, "team-a")
    assert found["pod"] == (promql_parser.MatchOp.Re, r"m\-g0\-0|m\-g1\-0")
    assert set(found["__name__"][1].split("|")) == USED_NAMES


def test_range_query_uses_installation_labels_and_names() -> None:
    found = matchers(range_query(INSTALLED, namespace="a", pods=["p"], seconds=45))
    assert found["kubernetes_pod_name"][1] == "p"
    assert found["kubernetes_namespace"][1] == "a"
    assert found["cluster"][1] == "eu"
    names = set(found["__name__"][1].split("|"))
    assert {"vllm_ttft_bucket", "vllm_ttft_sum", "trimtab:generation", "vllm:num_requests_running"} <= names
    assert not {"vllm:time_to_first_token_seconds_bucket", "trimtab_config_generation"} & names


@pytest.mark.parametrize("label", ["namespace", "pod"])
def test_labels_cannot_override_namespace_or_pod(label: str) -> None:
    found = matchers(range_query(PrometheusNaming(), namespace="mine", pods=["p"], seconds=45, labels={label: "other"}))
    assert (found["namespace"][1], found["pod"][1]) == ("mine", "p")


@pytest.mark.parametrize("value", ['"', "\\", '",job=~".*', "\n", "}", "ü", "{{.}}", "`", "\u2028", "#"])
def test_label_values_are_quoted(value: str) -> None:
    query = range_query(PrometheusNaming(), namespace="n", pods=["p"], seconds=45, labels={"job": value})
    assert matchers(query)["job"] == (promql_parser.MatchOp.Equal, value)
    assert set(matchers(query)) == {"__name__", "namespace", "pod", "job"}


# --- responses --------------------------------------------------------------------------------------------------------


def stored(at: float, *targets: dict[str, str], scale: float = 1.0) -> list[StoredSeries]:
    """Return one scrape of an engine at `at`, by each of these targets."""
    return [
        StoredSeries(name, {"namespace": "n", "pod": "p", **labels, **target}, [(at, value * scale)])
        for target in targets or ({"job": "engines"},)
        for name, labels, value in exposed(make_sample(at))
    ]


def test_a_page_from_prometheus_decodes_as_the_engines_own() -> None:
    page = newest_page("p", group_scrapes(stored(100.0), PrometheusNaming())["p"])
    assert sample_of(page.series, at=page.at) == make_sample(100.0)


def test_newest_page_does_not_mix_scrapes() -> None:
    half = [series for series in stored(115.0) if series.name != "vllm:num_requests_waiting"]
    page = newest_page("p", group_scrapes([*stored(100.0), *half], PrometheusNaming())["p"])
    assert page.at == 115.0
    with pytest.raises(Unreadable, match="lacks vllm:num_requests_waiting"):
        sample_of(page.series, at=page.at)


def test_data_parallel_ranks_are_one_target() -> None:
    ranks = [StoredSeries(s.name, {**s.labels, "engine": rank}, s.samples) for s in stored(50.0) for rank in ("0", "1")]
    page = newest_page("p", group_scrapes(ranks, PrometheusNaming())["p"])
    assert sample_of(page.series, at=0.0).counters.generated_tokens == 2 * make_sample(50.0).counters.generated_tokens


def test_a_pod_that_two_jobs_scrape_is_named_with_both() -> None:
    scrapes = group_scrapes(stored(100.0, {"job": "engines"}, {"job": "annotated"}), PrometheusNaming())
    with pytest.raises(DuplicateTargets, match=r"p is scraped as 2 targets: \(job=annotated\); \(job=engines\)"):
        newest_page("p", scrapes["p"])


def test_matchers_select_one_of_two_targets() -> None:
    naming = PrometheusNaming(matchers={"job": "engines"})
    assert newest_page("p", group_scrapes(stored(1.0, {"job": "engines"}), naming)["p"]).at == 1.0


def test_newest_page_ignores_earlier_pod_of_same_name() -> None:
    scrapes = group_scrapes(
        [*stored(90.0, {"instance": "old"}), *stored(100.0, {"instance": "new"})], PrometheusNaming()
    )
    assert newest_page("p", scrapes["p"], since=95.0).at == 100.0
    with pytest.raises(Unreadable, match="no scrape of pod p"):
        newest_page("p", scrapes["p"], since=105.0)


def test_aliased_series_get_engine_names() -> None:
    renamed = [
        StoredSeries(INSTALLED.stored_name(s.name), {**s.labels, "kubernetes_pod_name": "p"}, s.samples)
        for s in stored(100.0)
    ]
    page = newest_page("p", group_scrapes(renamed, INSTALLED)["p"])
    assert sample_of(page.series, at=100.0) == make_sample(100.0)


def test_an_answer_is_read_with_its_times_and_special_numbers() -> None:
    body = {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                {"metric": {"__name__": "a", "pod": "p"}, "values": [[1.5, "2"], [2, "NaN"], [3, "+Inf"]]},
                {"metric": {"__name__": "native"}, "histograms": [[1, {"count": "3"}]]},
            ],
        },
    }
    (series,) = parse_matrix(json.dumps(body))
    assert (series.name, series.labels, series.samples[0]) == ("a", {"pod": "p"}, (1.5, 2.0))
    assert [str(value) for _, value in series.samples] == ["2.0", "nan", "inf"]


BROKEN: list[tuple[str, str]] = [
    ("", "not JSON"),
    ("<html>", "not JSON"),
    ("[" * 200_000, "not JSON"),
    ("[]", "is not Prometheus"),
    ('{"status":"ok"}', "is not Prometheus"),
    (
        '{"status":"error","errorType":"execution","error":"too many samples"}',
        "it rejects the query: execution: too many samples",
    ),
    ('{"status":"success"}', "not a matrix"),
    ('{"status":"success","data":{"resultType":"vector","result":[]}}', "not a matrix"),
    ('{"status":"success","data":{"resultType":"matrix","result":{}}}', "not a list"),
    ('{"status":"success","data":{"resultType":"matrix","result":[{"metric":[],"values":[]}]}}', "no labels"),
    ('{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"a":1},"values":[]}]}}', "not a string"),
    ('{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1]]}]}}', "cannot be read"),
    ('{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1,2]]}]}}', "not a number"),
    (
        '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1,"1_0"]]}]}}',
        "not a number",
    ),
    ('{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[["x","1"]]}]}}', "not a time"),
    ('{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[NaN,"1"]]}]}}', "not a time"),
]


@pytest.mark.parametrize(("body", "why"), BROKEN)
def test_invalid_responses_are_reported(body: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        parse_matrix(body)


def test_parse_clock_returns_the_time() -> None:
    assert parse_clock('{"status":"success","data":{"resultType":"scalar","result":[7.25,"7.25"]}}') == 7.25


@pytest.mark.parametrize("result", ["7", "[]", '[NaN,"1"]', '["7","7"]', "[true,1]"])
def test_invalid_clock_responses_are_reported(result: str) -> None:
    with pytest.raises(Unreadable, match="has no time"):
        parse_clock(f'{{"status":"success","data":{{"resultType":"scalar","result":{result}}}}}')
