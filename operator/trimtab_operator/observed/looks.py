"""One replica as the tuner looks at it: what Kubernetes says of its pods, joined with what its engine said. Pure."""

from __future__ import annotations

from trimtab_operator.observed.ends import ends_of, exit_code_of, was_oom_killed
from trimtab_operator.observed.engines import EngineSeen
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import is_placed
from trimtab_operator.observed.pods import readiness_since
from trimtab_operator.tuner.samples import Look, Phase


def look_of(group: Group, seen: EngineSeen | None) -> Look:
    """A look at a replica. An engine that was asked before its pod became Ready, or not at all, has said nothing."""
    leader = group.leader
    answer = seen if seen is not None else EngineSeen(group.is_ready, "its engine was not asked")
    return Look(
        replica=group.name,
        phase=phase_for_tuning(group),
        instance="" if leader is None else str(leader["metadata"]["uid"]),
        since=_since(group),
        sample=answer.sample,
        config=answer.config,
        ledger=answer.ledger,
        problem=answer.problem,
        absence=answer.absence,
        was_oom_killed=any(map(was_oom_killed, group.pods)),
        exit_code=None if leader is None else exit_code_of(leader),
        restarts=0 if leader is None else ends_of(leader),
    )


def phase_for_tuning(group: Group) -> Phase:
    """How far a replica is in its life. One whose pods are being replaced is on its way; one of whose pods a single one
    finds no node waits as a whole."""
    if group.is_ready:
        return Phase.READY
    return Phase.STARTING if is_placed(group) else Phase.PENDING


def _since(group: Group) -> float:
    """Since when it is in its phase; 0 where nothing says."""
    if group.leader is None:
        return 0.0 if group.missing is None else group.missing.since
    since = readiness_since(group.leader)
    return 0.0 if since is None else since.timestamp()
