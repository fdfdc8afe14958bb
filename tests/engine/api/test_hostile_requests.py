"""Requests and connections made to harm: what one client sends costs others no more than its share.

A well-behaved client streams and probes meanwhile. Its longest gap is compared with the one of the same machine
before and after the attack, because other work on it causes gaps as well. `make soak` runs ten times as long, with the
limits of docs/results/hostile-requests.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hostile_requests
import pytest

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

MIB = 1 << 20
SECONDS, SOAK_SECONDS = 12.0, 120.0
COARSE_PROBE_SECONDS = 10.0  # probes of a busy machine
COARSE_GAP_SECONDS = 1.0  # the attacks that this test repeats stopped all streams for 1.5 to 59 s
GAP_SECONDS = 0.1
KEPT_BYTES = 32 * MIB


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path, real_engine: type[RealEngine]) -> Iterator[RealEngine]:
    """An engine with a long context and few open files."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--max-model-len", "4096", "--num-gpu-blocks-override", "3000", "--max-num-seqs", "128")
    engine = real_engine(tmp_path, tmp_path / "log", *flags, "--max-num-batched-tokens", "512")
    yield engine
    engine.end()


def attack(engine: RealEngine, seconds: float, gap: float, probe_timeout: float, seed: int) -> int:
    """Check the effect on other clients. Return the bytes of memory kept."""
    port = engine.http.base_url.port
    assert port is not None
    seen, resident = {}, {}
    for phase, watched, num_bytes in hostile_requests.phases(port, engine.process.pid, seconds, seed, probe_timeout):
        seen[phase], resident[phase] = watched, num_bytes
    print({phase: (vars_of, resident[phase] // MIB) for phase, vars_of in seen.items()})
    undisturbed = max(seen["before"].longest_gap, seen["after"].longest_gap)
    assert seen["attack"].failed_probes == 0
    assert seen["attack"].longest_gap <= undisturbed + gap
    assert engine.process.poll() is None
    assert engine.post("ab").status_code == 200
    return resident["after"] - resident["before"]


def test_hostile_requests_do_not_stop_other_streams(engine: RealEngine) -> None:
    # A cache that fills in an attack is not a leak: a leak grows again in each attack.
    kept = [attack(engine, SECONDS, COARSE_GAP_SECONDS, COARSE_PROBE_SECONDS, seed=34)]
    while kept[-1] > KEPT_BYTES and len(kept) < 3:
        kept.append(attack(engine, SECONDS, COARSE_GAP_SECONDS, COARSE_PROBE_SECONDS, seed=34 + len(kept)))
    assert kept[-1] <= KEPT_BYTES, kept


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_hostile_requests_delay_other_streams_by_a_tenth_of_a_second(engine: RealEngine) -> None:
    assert attack(engine, SOAK_SECONDS, GAP_SECONDS, hostile_requests.PROBE_TIMEOUT_SECONDS, seed=34) <= KEPT_BYTES
