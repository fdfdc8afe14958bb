"""Preemption storm: the load rises beyond what the KV cache holds, which is too small by half.

Measures how soon recomputation ends and TTFT after that, compared with no changes and with a large enough cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimtab_simulator.experiment import Experiment
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import Policy, PolicyActions, PolicyInput
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.replay import ReplaySettings

from simulator_benchmarks.live_parameters.figures import Figure, first_token, reversals_figure
from simulator_benchmarks.live_parameters.loads import BOTH, Phase, budget_of, h200, poisson, run
from simulator_benchmarks.scenarios import CONVERSATIONS

CALM_SECONDS, STORM_SECONDS = 300.0, 600.0
CALM_RATE, STORM_RATE = 2.0, 5.5
ENOUGH_TOKENS = 40_000  # of KV cache, with hardly any preemption for that load
WINDOW_SECONDS = 15.0
CALM_SHARE = 0.01  # recomputed share of the tokens


class RecordingPolicy:
    """A policy that records the recomputed tokens of each tick."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.tick_seconds = WINDOW_SECONDS
        self.reads_requests = policy.reads_requests
        self.windows: list[tuple[float, float, float]] = []
        """End time, recomputed tokens, and all computed tokens of each window."""
        self._policy, self._before = policy, (0.0, 0.0)

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Record, and call the policy."""
        twice = computed = 0.0
        for snapshot in view.ready:
            assert snapshot.sample is not None
            counters = snapshot.sample.counters
            twice += counters.recomputed_tokens or 0.0
            computed += sum(work.tokens for work in (counters.decode, counters.prefill) if work is not None)
        (old_twice, old_computed), self._before = self._before, (twice, computed)
        self.windows.append((view.now, twice - old_twice, computed - old_computed))
        return self._policy.decide(view)


class ObservedFixed(Fixed):
    """No changes, with a record at every tick."""

    def __init__(self) -> None:
        super().__init__("off")
        self.tick_seconds = WINDOW_SECONDS


def storm(folder: Path, seed: int) -> Iterator[Figure]:
    """Yield figures of conversations whose rate rises beyond the KV cache, with and without device headroom."""
    phases = (Phase(CONVERSATIONS, CALM_RATE, CALM_SECONDS), Phase(CONVERSATIONS, STORM_RATE, STORM_SECONDS))
    trace = poisson(folder, phases, seed)
    for headroom in (True, False):
        name = "headroom" if headroom else "no headroom"
        seen = {}
        for policy in (ObservedFixed(), None):
            settings = h200(budget_of(1024), ENOUGH_TOKENS // 2, headroom=headroom)
            experiment = Experiment(
                trace, settings, ReplaySettings(seed=seed, timeline_interval_seconds=math.inf), BOTH
            )
            watched = RecordingPolicy(policy or Trimtab(experiment.setup))
            seen[watched.name] = (watched, experiment.run(watched))
        enough = run(trace, h200(budget_of(1024), ENOUGH_TOKENS), BOTH, Fixed("enough"), seed)
        (watched, tuned), (unwatched, off) = seen["trimtab"], seen["off"]
        took, afterwards = time_to_calm(watched.windows)
        details = {
            "storm windows": float(count_storm_windows(watched)),
            "of Off's": float(count_storm_windows(unwatched)),
        }
        yield Figure("storm", name, seed, "seconds until under 1 %", took, 30.0, False, details)
        yield Figure("storm", name, seed, "recomputed share from then on", afterwards, CALM_SHARE, False)
        since = CALM_SECONDS + 60.0
        ttft = {label: first_token(o.served, since) for label, o in (("auto", tuned), ("off", off), ("enough", enough))}
        details = {label: round(1000 * seconds, 1) for label, seconds in ttft.items()}
        yield Figure("storm", name, seed, "TTFT p50 of Off's", ttft["auto"] / ttft["off"], 1.2, False, details)
        if headroom:  # without it, only another replica could hold this load
            of_enough = ttft["auto"] / ttft["enough"]
            yield Figure("storm", name, seed, "TTFT p50 of enough KV's", of_enough, 1.2, False, details)
        yield reversals_figure("storm", name, seed, tuned.changes)


def is_storm(twice: float, computed: float) -> bool:
    """Return True if more than CALM_SHARE of the tokens was recomputed."""
    return twice > CALM_SHARE * computed


def count_storm_windows(watched: RecordingPolicy) -> int:
    """Return the number of windows with a storm."""
    return sum(is_storm(twice, computed) for _, twice, computed in watched.windows)


def time_to_calm(windows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the seconds from the first storm window to the first calm one after it, and the recomputed share from then
    on.
    """
    first = next((index for index, (_, *counts) in enumerate(windows) if is_storm(*counts)), len(windows))
    calm = next((index for index, (_, *counts) in enumerate(windows) if index > first and not is_storm(*counts)), None)
    if first == len(windows):
        return 0.0, 0.0
    if calm is None:
        return math.inf, 1.0
    rest = windows[calm:]
    share = sum(twice for _, twice, _ in rest) / max(1.0, sum(computed for _, _, computed in rest))
    return windows[calm][0] - windows[first][0], share
