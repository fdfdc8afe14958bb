"""Engine flags in `spec.runtime.args` that set the scheduling policy."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab_operator.resource.spec import Spec
from trimtab_operator.validation.engine_flags import spelled

SCHEDULING_POLICY_FLAGS = ("--scheduling-policy", "--ttft-target", "--ttft-target-per-prompt-token")


def scheduling_flags(spec: Spec) -> Iterator[tuple[int, str]]:
    """Yield the index and name of each flag in `spec.runtime.args` that sets the scheduling policy."""
    for index, argument in enumerate(spec.runtime.args):
        flag = spelled(argument)
        if flag in SCHEDULING_POLICY_FLAGS:
            yield index, flag
