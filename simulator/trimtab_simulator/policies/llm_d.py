"""llm-d's SLO-aware autoscaling: a KEDA formula over the tail latency as a share of its target.

Source: docs/architecture/autoscaling/slo-aware-keda.md and guides/workload-autoscaling/slo-aware of llm-d,
release-0.10; all constants are the benchmarked ones. Every 15 s

    s = mean over 45 s of min(2, max(P90 TTFT / target, P90 TPOT / target)), P90 over bucket rates of 1 minute
    d = n + ceil(n (s c / 0.55 - 1)) if s > 0.55; n - floor(n (1 - s / 0.40)) if s < 0.40; else n

with n pods, of which a share c is ready. An HPA follows d: up after 30 s by at most double or 4 pods a minute, down
after 180 s by one pod in two minutes. Measured latencies are read, which is the guide's way without a latency
predictor. Where the TTFT objective grows with the prompt, the target is that of the mean prompt.
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.samples.sample import histogram_quantile

from trimtab_simulator.objectives import Objectives
from trimtab_simulator.policies.hpa import Behavior, Hpa, total
from trimtab_simulator.policies.policy import PolicyInput, PolicySetup
from trimtab_simulator.policies.signals import Increases, Sliding, lengths, num_pods

QUANTILE = 0.9
RATE_SECONDS, SMOOTHING_SECONDS = 60.0, 45.0
MOST = 2.0
UP, DOWN = 0.55, 0.40
BEHAVIOR = Behavior(up_window=30, up_period=60, down_window=180, down_pods=1, down_period=120)


class _Saturation:
    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._ttft = Increases(RATE_SECONDS, lambda sample: sample.ttft.counts if sample.ttft else ())
        self._tpot = Increases(RATE_SECONDS, lambda sample: sample.mean_itl.counts if sample.mean_itl else ())
        self._prompts = Increases(RATE_SECONDS, lengths)
        self._recent = Sliding(SMOOTHING_SECONDS)

    def desired(self, view: PolicyInput) -> float:
        """Return d."""
        for window in (self._ttft, self._tpot, self._prompts):
            window.add(view)
        self._recent.add(view.now, min(MOST, self._share_of_target(view)))
        pods, ready, share = num_pods(view), len(view.ready), self._recent.mean
        if share > UP:
            # A pod that starts lowers the request, but the guide never removes pods above the threshold.
            return pods + max(0, math.ceil(pods * (share * ready / pods / UP - 1)))
        if share < DOWN:
            return pods - math.floor(pods * (1 - share / DOWN))
        return pods

    def _share_of_target(self, view: PolicyInput) -> float:
        sample = view.ready[0].sample
        assert sample is not None
        requests, tokens, *_ = self._prompts.totals
        limits = (self._objectives.ttft_of(round(tokens / requests) if requests else 0), self._objectives.itl_mean)
        found = 0.0
        for histogram, window, limit in zip(
            (sample.ttft, sample.mean_itl), (self._ttft, self._tpot), limits, strict=True
        ):
            if histogram is not None and limit is not None:
                found = max(found, (histogram_quantile(QUANTILE, histogram.edges, window.totals) or 0.0) / limit)
        return found


def llm_d_slo(setup: PolicySetup) -> Hpa:
    """Return the autoscaler with the objectives as targets."""
    return Hpa("llm-d-slo", total(_Saturation(setup.objectives).desired, 1.0), behavior=BEHAVIOR)
