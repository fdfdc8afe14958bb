"""Which adapters run and which wait: vLLM's family, whose labels say it and whose value is when that was so."""

import time
from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages import StepStats


class AdapterMetrics:
    """Fed with every StepStats, some at a time. Without adapters it shows nothing."""

    def __init__(self, families: FamilyFactory) -> None:
        self._info = families.labelled_gauge(
            "vllm:lora_requests_info",
            "Adapters whose requests run, and whose requests wait; the value is the time at which it was so",
            "max_lora",
            "waiting_lora_adapters",
            "running_lora_adapters",
        )

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        told = next((stats.adapters for stats in reversed(steps) if stats.adapters is not None), None)
        if told is not None:
            self._info.clear()
            labels = str(told.max_loras), ",".join(told.waiting), ",".join(told.running)
            self._info.of(*labels).set(time.time())
