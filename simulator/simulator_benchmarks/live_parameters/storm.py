"""A storm of preemptions: a load rises beyond what the KV cache holds, which is too small for it by half.

How soon hardly anything is computed twice any more, and what first tokens take then: beside nothing moved, and beside
a cache that is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimtab_simulator.contest import Contest
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import Policy, PolicyActions, View
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.replay import Loop

from simulator_benchmarks.live_parameters.figures import Figure, first_token, turns_of
from simulator_benchmarks.live_parameters.loads import BOTH, Phase, budget_of, h200, play, poisson
from simulator_benchmarks.scenarios import CONVERSATIONS

CALM_SECONDS, STORM_SECONDS = 300.0, 600.0
CALM_RATE, STORM_RATE = 2.0, 5.5
ENOUGH_TOKENS = 40_000  # of KV cache for that load: hardly anything is preempted
WINDOW_SECONDS = 15.0
CALM_SHARE = 0.01  # of the tokens computed twice


class Watched:
    """A policy, and how many tokens were computed twice in each of its ticks."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.tick_seconds = WINDOW_SECONDS
        self.reads_requests = policy.reads_requests
        self.windows: list[tuple[float, float, float]] = []
        """When each ended, tokens computed twice, and all that were computed."""
        self._policy, self._before = policy, (0.0, 0.0)

    def decide(self, view: View) -> PolicyActions:
        """Read, and have the policy decide."""
        twice = computed = 0.0
        for snapshot in view.ready:
            assert snapshot.sample is not None
            counters = snapshot.sample.counters
            twice += counters.recomputed_tokens or 0.0
            computed += sum(work.tokens for work in (counters.decode, counters.prefill) if work is not None)
        (old_twice, old_computed), self._before = self._before, (twice, computed)
        self.windows.append((view.now, twice - old_twice, computed - old_computed))
        return self._policy.decide(view)


class Idle(Fixed):
    """Nobody steers, and every tick looks."""

    def __init__(self) -> None:
        super().__init__("off")
        self.tick_seconds = WINDOW_SECONDS


def storm(folder: Path, seed: int) -> Iterator[Figure]:
    """Conversations whose rate rises beyond what the KV cache holds, on a device with headroom and without."""
    phases = (Phase(CONVERSATIONS, CALM_RATE, CALM_SECONDS), Phase(CONVERSATIONS, STORM_RATE, STORM_SECONDS))
    trace = poisson(folder, phases, seed)
    for headroom in (True, False):
        name = "headroom" if headroom else "no headroom"
        seen = {}
        for policy in (Idle(), None):
            settings = h200(budget_of(1024), ENOUGH_TOKENS // 2, headroom=headroom)
            contest = Contest(trace, settings, Loop(seed=seed, moment_seconds=math.inf), BOTH)
            watched = Watched(policy or Trimtab(contest.setup))
            seen[watched.name] = (watched, contest.play(watched))
        enough = play(trace, h200(budget_of(1024), ENOUGH_TOKENS), BOTH, Fixed("enough"), seed)
        (watched, ours), (unwatched, off) = seen["trimtab"], seen["off"]
        took, afterwards = calmed(watched.windows)
        told = {"loud windows": float(loud_windows(watched)), "of Off's": float(loud_windows(unwatched))}
        yield Figure("storm", name, seed, "seconds until under 1 %", took, 30.0, False, told)
        yield Figure("storm", name, seed, "share computed twice from then on", afterwards, CALM_SHARE, False)
        since = CALM_SECONDS + 60.0
        ttft = {label: first_token(o.served, since) for label, o in (("auto", ours), ("off", off), ("enough", enough))}
        told = {label: round(1000 * seconds, 1) for label, seconds in ttft.items()}
        yield Figure("storm", name, seed, "TTFT p50 of Off's", ttft["auto"] / ttft["off"], 1.2, False, told)
        if headroom:  # without any, only another replica could hold this load
            of_enough = ttft["auto"] / ttft["enough"]
            yield Figure("storm", name, seed, "TTFT p50 of enough KV's", of_enough, 1.2, False, told)
        yield turns_of("storm", name, seed, ours.changes)


def is_loud(twice: float, computed: float) -> bool:
    """Whether more than a hundredth of the tokens was computed twice."""
    return twice > CALM_SHARE * computed


def loud_windows(watched: Watched) -> int:
    """How many of its windows were loud."""
    return sum(is_loud(twice, computed) for _, twice, computed in watched.windows)


def calmed(windows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds from the beginning of the first loud window to that of the first calm one after it, and the share of the
    tokens that was computed twice from then on."""
    first = next((index for index, (_, *counts) in enumerate(windows) if is_loud(*counts)), len(windows))
    calm = next((index for index, (_, *counts) in enumerate(windows) if index > first and not is_loud(*counts)), None)
    if first == len(windows):
        return 0.0, 0.0
    if calm is None:
        return math.inf, 1.0
    rest = windows[calm:]
    share = sum(twice for _, twice, _ in rest) / max(1.0, sum(computed for _, _, computed in rest))
    return windows[calm][0] - windows[first][0], share
