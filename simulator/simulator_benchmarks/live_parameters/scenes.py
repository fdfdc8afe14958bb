"""The demo's scenes: closed-loop clients on an engine that holds half of them, with and without device headroom.

With a TTFT objective and with an ITL objective, each compared with the same load without changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, Machine
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import PolicySetup
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.trace.arrivals import Trace

from simulator_benchmarks.closed_loop import Clients, run_clients
from simulator_benchmarks.live_parameters.figures import Figure, good_tokens, reversals_figure
from simulator_benchmarks.live_parameters.loads import one_replica

CLIENTS, PROMPT, ANSWER = 16, 64, 192
SCENE_SECONDS, SCENE_WARM_UP = 900.0, 120.0
SCENE_KV_TOKENS, SCENE_MORE_TOKENS = 2032, 2848  # the demo's, and what the device has left
SCENE_COST = StepCost(0.02, 0.004, 0.002, 1e-6)  # a small model on a few processor cores
TTFT_OBJECTIVE = Objectives(5.0, attain=0.95)
ITL_OBJECTIVE = Objectives(itl_mean=0.15, attain=0.95)
HEADROOM = 0.05  # of the device


def scene_settings(*, headroom: bool) -> FleetSettings:
    """Return the demo's engine: half of its clients' outputs fit."""
    bytes_per_token = 23_040
    machine = Machine(
        "smollm2-135m",
        "cpu",
        SCENE_COST,
        SCENE_KV_TOKENS,
        device_bytes=round(SCENE_MORE_TOKENS * bytes_per_token / HEADROOM),
        bytes_per_token=bytes_per_token,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_num_seqs_cap=32,
        max_num_batched_tokens_cap=2048,
        max_model_len=1024,
        cap_utilization=START_UTILIZATION + (HEADROOM if headroom else 0.0),
    )
    return one_replica(machine, {Parameter.MAX_NUM_SEQS: 32, Parameter.MAX_NUM_BATCHED_TOKENS: 256})


def scenes(_: Path, seed: int) -> Iterator[Figure]:
    """Yield figures of the demo's two scenes for each of two objectives."""
    clients = Clients(CLIENTS, lambda rng: (PROMPT, ANSWER))
    for headroom in (True, False):
        settings = scene_settings(headroom=headroom)
        for objective_name, objectives in (("first token", TTFT_OBJECTIVE), ("gaps", ITL_OBJECTIVE)):
            played = {
                policy.name: run_clients(settings, policy, clients, seconds=SCENE_SECONDS, seed=seed)
                for policy in (Fixed("off"), Trimtab(_setup(settings, objectives, seed)))
            }
            good = {
                name: good_tokens(came.served, objectives, SCENE_WARM_UP, SCENE_SECONDS)
                for name, came in played.items()
            }
            name = f"{'headroom' if headroom else 'no headroom'}, {objective_name} promised"
            details = {"off": round(good["off"], 2), "auto": round(good["trimtab"], 2)}
            yield Figure("scenes", name, seed, "goodput of Off's", good["trimtab"] / good["off"], 1.0, details=details)
            yield reversals_figure("scenes", name, seed, played["trimtab"].changes)


def _setup(settings: FleetSettings, objectives: Objectives, seed: int) -> PolicySetup:
    return Experiment(Trace("", [], 0.0), settings, ReplaySettings(seed=seed), objectives).setup
