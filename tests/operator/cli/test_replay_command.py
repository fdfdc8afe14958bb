"""`trimtab replay`: recordings from files and Prometheus, comparison, and input errors."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_prometheus import exposed, number
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.samples.codec import to_json
from trimtab_operator.tuner.samples.recorded import Tick
from trimtab_operator.tuner.settings import Mode, Pace, Settings
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import decision_to_json
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample
from typer.testing import CliRunner, Result

BEGIN, TICK = 1_700_000_000.0, 15.0
SPEC = {
    "model": {"uri": "file:///m"},
    "runtime": {"device": "cpu", "image": "x"},
    "engine": {"gpuMemoryUtilization": "0.80", "maxNumSeqs": 64, "maxNumBatchedTokens": 2048},
    "tuning": {
        "mode": "Auto",
        "bounds": {
            "gpuMemoryUtilization": {"min": "0.50", "max": "0.95"},
            "maxNumSeqs": {"min": 1, "max": 256},
            "maxNumBatchedTokens": {"min": 64, "max": 8192},
        },
    },
}


@pytest.fixture
def resource(tmp_path: Path) -> Path:
    """The resource whose engines were recorded."""
    path = tmp_path / "deployment.yaml"
    body = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferenceDeployment", "spec": SPEC}
    path.write_text(yaml.safe_dump({**body, "metadata": {"name": "m", "namespace": "team-a"}}))
    return path


def lived(ticks: int = 12) -> tuple[list[Tick], list[Decision]]:
    """Return a recorded run with preemptions and its decisions."""
    settings = Settings(Mode.AUTO, starts=PARAMETERS, pace=Pace(tick_seconds=TICK))
    memory, values, generation = TunerState(), dict(PARAMETERS), 1
    seen: list[Tick] = []
    made: list[Decision] = []
    for step in range(ticks):
        now = BEGIN + TICK * step
        worked = TICK * step
        sample = replace(
            make_sample(worked, generation=generation, kv_usage=0.99, preemptions={"capacity": worked},
                     recomputed_tokens=20.0 * worked),
            at=now,
        )  # fmt: skip
        look = make_replica_snapshot("m-g0-0", sample, values=values)
        seen.append(Tick(now, (look,)))
        outcome = decide([look], memory, settings, now)
        memory = outcome.state
        made += outcome.decisions
        for patch in outcome.patches.values():
            values.update(patch)
            generation += 1
    return seen, made


def write_looks(path: Path, ticks: list[Tick]) -> Path:
    path.write_text("".join(to_json(tick.snapshots, now=tick.at) + "\n" for tick in ticks))
    return path


def write_range(path: Path, ticks: list[Tick]) -> Path:
    """Return the response of Prometheus to a range query."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[list[Any]]] = {}
    for tick in ticks:
        (look,) = tick.snapshots
        assert look.sample is not None
        assert look.config is not None
        rows = [
            *exposed(look.sample),
            *(("trimtab_config_value", {"field": knob.value}, float(v)) for knob, v in look.config.applied.items()),
            *(
                ("trimtab_memory_bytes", {"kind": kind}, size)
                for kind, size in (("kv_mapped", 1e10), ("free", 3e9), ("weights", 3e9))
            ),
            *(("trimtab_kv_blocks", {"state": state}, count) for state, count in (("total", 1e4), ("cap", 1.2e4))),
        ]
        for name, labels, value in rows:
            key = name, tuple(sorted(labels.items()))
            found.setdefault(key, []).append([tick.at, number(value)])
    result = [
        {"metric": {"__name__": name, "pod": "m-g0-0", "namespace": "team-a", **dict(labels)}, "values": values}
        for (name, labels), values in found.items()
    ]
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    return path


def run(*words: str | Path, given: str = "") -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, words)], input=given)


def refused(*words: str | Path, given: str = "") -> str:
    done = run(*words, given=given)
    assert done.exit_code == 2, done.output
    return done.stderr.strip()


def test_recorded_looks_are_decided_again_alike(tmp_path: Path, resource: Path) -> None:
    ticks, _ = lived()
    done = run(write_looks(tmp_path / "samples.jsonl", ticks), "-f", resource)
    assert done.exit_code == 0, done.output
    assert "12 samples of 1 replica, 11-14 22:13:20 to 11-14 22:16:05" in done.stdout
    assert "gpu_memory_utilization 0.8 → 0.89 (KVCacheTooSmall)" in done.stdout
    assert "1 same" in done.stdout


def test_replay_of_prometheus_repeats_decisions_and_saves(tmp_path: Path, resource: Path) -> None:
    ticks, _ = lived()
    stored, saved = write_range(tmp_path / "range.json", ticks), tmp_path / "samples.jsonl"
    done = run(stored, "-f", resource, "--save", saved, "-o", "json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["same"] is True
    assert [row["verdict"] for row in told["rows"]] == ["same"]
    assert told["recording"]["snapshots"] == 12
    assert run(saved, "-f", resource, "-o", "json").stdout == done.stdout


def test_recordings_may_be_compressed_or_come_from_standard_input(tmp_path: Path, resource: Path) -> None:
    plain = write_looks(tmp_path / "samples.jsonl", lived()[0])
    packed = tmp_path / "samples.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert run(packed, "-f", resource).exit_code == 0
    assert run("-", "-f", resource, given=plain.read_text()).exit_code == 0


def test_replay_compares_with_why_output(tmp_path: Path, resource: Path) -> None:
    ticks, made = lived()
    then = tmp_path / "why.json"
    then.write_text(json.dumps({"decisions": [decision_to_json(decision) for decision in made]}))
    looks = write_looks(tmp_path / "samples.jsonl", ticks)
    done = run(looks, "-f", resource, "--decided", then)
    assert done.exit_code == 0, done.output
    assert "original decision" in done.stdout


def test_replay_compares_with_resource_history(tmp_path: Path, resource: Path) -> None:
    moment = datetime.fromtimestamp(BEGIN + 30, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry = {
        "id": "x",
        "time": moment,
        "knob": "max_num_seqs",
        "from": "64",
        "to": "32",
        "reason": "R",
        "message": "M.",
    }
    then = tmp_path / "resource.json"
    then.write_text(json.dumps({"status": {"tuning": {"history": [entry]}}}))
    done = run(write_looks(tmp_path / "samples.jsonl", lived()[0]), "-f", resource, "--decided", then)
    assert done.exit_code == 1
    assert "max_num_seqs 64 → 32 (R)" in done.stdout
    assert "1 only recorded, 1 only replayed" in done.stdout


def test_replay_without_resource_uses_default_objectives(tmp_path: Path) -> None:
    done = run(write_looks(tmp_path / "samples.jsonl", lived()[0]))
    assert done.exit_code == 0, done.output


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path: Path) -> None:
    looks = write_looks(tmp_path / "samples.jsonl", lived(3)[0])
    good = looks.read_text().splitlines()
    cases = {
        "{": "line 2: Expecting property name",
        '{"version":9,"now":1,"snapshots":[]}': "line 2: snapshot version 9 is not supported; expected 1",
        '{"version":1,"now":"soon","snapshots":[]}': "line 2: 'soon' is not a number",
        '{"version":1,"now":1e999,"snapshots":[]}': "line 2: inf is not a time",
        '{"version":1,"now":1700000001,"snapshots":[{}]}': "line 2: not a recorded snapshot: 'sample' is missing",
        good[0]: "line 2: time is not after the time of the previous line",
        good[1].replace('"generated_tokens":600.0', '"generated_tokens":"many"'): "line 2: 'many' is not a number",
        good[1].replace('"phase":"ready"', '"phase":"asleep"'): "line 2: 'asleep' is not a valid Phase",
    }
    for line, said in cases.items():
        looks.write_text("\n".join((good[0], line, good[2])) + "\n")
        assert f"{looks}: {said}" in refused(looks), line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty file"),
        ("\n\n", "empty file"),
        ("hello", "the response is not JSON"),
        ("{}", "the server is not Prometheus"),
        (
            '{"status":"error","errorType":"bad_data","error":"parse error"}',
            "it rejects the query: bad_data: parse error",
        ),
        ('{"status":"success","data":{"resultType":"vector","result":[]}}', "the response is not a matrix"),
        ('{"status":"success","data":{"resultType":"matrix","result":[]}}', "no series of an engine with a pod name"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert said in refused(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "gone")
    assert "cannot be read" in refused(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refused(binary)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"x" * 100_000)[:50])
    assert "cannot be read" in refused(broken)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "pass either a RECORDING, or --prometheus"),
        (["-", "--prometheus", "http://p"], "pass either a RECORDING, or"),
        (["-", "--decided", "-"], "standard input is already used"),
        (["--prometheus", "http://p"], "--prometheus needs a resource"),
        (["--prometheus", "http://p", "--name", "m", "--from", "soon"], "--from: 'soon' is not a time"),
        (["--prometheus", "http://p", "--name", "m", "--from", "1h", "--to", "2h"], "--from must be before --to"),
        (["--prometheus", "http://p", "--name", "m", "--from", "9000h"], "use at most 167 h"),
        (["--prometheus", "p:9090", "--name", "m"], "--prometheus: not a valid address ('p:9090')"),
        (["-", "--prometheus-match", "x"], "--prometheus-match: not a pair ('x')"),
        (["-", "--resource", "/nowhere"], "--resource /nowhere: cannot be read"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: list[str], said: str) -> None:
    assert said in refused(*flags)


def test_a_resource_that_decides_nothing_or_is_none_is_refused(tmp_path: Path, resource: Path) -> None:
    looks = write_looks(tmp_path / "samples.jsonl", lived(3)[0])
    body = yaml.safe_load(resource.read_text())
    for change, said in (
        ({"spec": {**SPEC, "tuning": {"mode": "Off"}}}, "mode is Off, which makes no decisions"),
        ({"spec": {**SPEC, "nonsense": 1}}, "nonsense"),
        ({"kind": "Pod"}, "contains 0 InferenceDeployment"),
    ):
        resource.write_text(yaml.safe_dump({**body, **change}))
        assert said in refused(looks, "-f", resource)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"decisions": [{}]}', '{"status": {"tuning": {"history": [1]}}}'])
def test_decided_without_decisions_is_rejected(text: str, tmp_path: Path) -> None:
    looks, then = write_looks(tmp_path / "samples.jsonl", lived(3)[0]), tmp_path / "then.json"
    then.write_text(text)
    assert f"--decided {then}" in refused(looks, "--decided", then)


def test_files_are_looked_at_before_the_recording_is_read(tmp_path: Path) -> None:
    looks = write_looks(tmp_path / "samples.jsonl", [])
    assert "does not exist; create it" in refused(looks, "--save", tmp_path / "no" / "folder")
    assert "is a directory; pass a file" in refused(looks, "--save", tmp_path)
    assert "file not found" in refused(looks, "--decided", tmp_path / "gone.json")


def test_a_prometheus_that_is_not_there_is_one_sentence() -> None:
    said = refused("--prometheus", "http://127.0.0.1:9", "--name", "m")
    assert said.startswith("--prometheus http://127.0.0.1:9: ")
    assert "ConnectError" in said
    assert said.endswith("From outside the cluster, use kubectl port-forward")
