"""Objects that the API server rejected, in the status and in the state of the next iteration. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trimtab_operator.errors import NameTaken
from trimtab_operator.kube.client import is_definite
from trimtab_operator.kube.rbac import missing_permission
from trimtab_operator.observed.actions import Apply, Rejection, kind_and_name
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.reconcile.executor import format_error
from trimtab_operator.report.conditions import Reason, join_errors

MIN_FAILURES_TO_REPORT = 3  # consecutive, before the status shows them: one lost connection is not worth reporting


def failure_reason(error: BaseException) -> Reason:
    """Return the condition reason of an error. Name conflicts and missing permissions need a user and get their own."""
    if isinstance(error, NameTaken):
        return Reason.NAME_CONFLICT
    return Reason.RECONCILE_ERROR if missing_permission(error) is None else Reason.FORBIDDEN


def with_rejections(plan: ReconcilePlan, rejections: Iterable[Rejection], *, num_ticks: int) -> ReconcilePlan:
    """Return the plan with the rejections in its status inputs and state.

    A rejection that may be temporary is reported if there were some in `num_ticks` >= MIN_FAILURES_TO_REPORT
    consecutive iterations.
    """
    rejections = tuple(rejections)
    names = {" ".join(kind_and_name(one.action)) for one in rejections}
    applied = {name: seen for name, seen in plan.repeated_applies.items() if name not in names}
    reported = [one for one in rejections if num_ticks >= MIN_FAILURES_TO_REPORT or _needs_user(one.error)]
    status_inputs = replace(
        plan.status_inputs,
        problem=plan.status_inputs.problem or _problem(one for one in reported if one.stops_serving),
        minor_problem=_problem(one for one in reported if not one.stops_serving),
    )
    rejected_group = next((format_error(one.error) for one in rejections if _creates_group(one)), None)
    state = replace(plan.state, rejected_group=rejected_group)
    return replace(plan, state=state, status_inputs=status_inputs, repeated_applies=applied)


def _needs_user(error: Exception) -> bool:
    return isinstance(error, NameTaken) or is_definite(error)


def _creates_group(rejection: Rejection) -> bool:
    action = rejection.action
    return isinstance(action, Apply) and action.is_new and action.manifest["kind"] == "StatefulSet"


def _problem(rejections: Iterable[Rejection]) -> tuple[Reason, str] | None:
    """Return the reason of the gravest rejection, and the messages of all; None if there is none."""
    found = {}
    for rejection in rejections:
        kind, name = kind_and_name(rejection.action)
        found[f"{kind} {name}: {format_error(rejection.error)}"] = failure_reason(rejection.error)
    if not found:
        return None
    order = (Reason.NAME_CONFLICT, Reason.FORBIDDEN, Reason.RECONCILE_ERROR)
    return min(found.values(), key=order.index), join_errors(found)
