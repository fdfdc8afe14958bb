"""What is told of downloads: an Event when a replica begins to fetch its model, and one when it has it. Pure.

What was so before is what the status says: an operator that starts in the middle tells neither twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab_operator.decisions.actions import Note
from trimtab_operator.observed.phases import DOWNLOAD, EngineView
from trimtab_operator.resource.spec import InferenceDeployment


def download_notes(deployment: InferenceDeployment, views: Mapping[str, EngineView]) -> tuple[Note, ...]:
    """What has begun or ended since the status was written."""
    groups = deployment.status.get("groups") or []
    before = {group.get("name"): (group.get("load") or {}).get("stage") for group in groups}
    found = []
    for name, view in sorted(views.items()):
        if view.load is None:
            continue
        is_downloading, was_downloading = view.load[0] == DOWNLOAD, before.get(name) == DOWNLOAD
        if is_downloading and not was_downloading:
            found.append(Note("Normal", "DownloadStarted", f"{name} fetches {_model(deployment)}", view.instance))
        elif was_downloading and not is_downloading:
            found.append(Note("Normal", "Downloaded", f"{name} has {_model(deployment)}", view.instance))
    return tuple(found)


def _model(deployment: InferenceDeployment) -> str:
    commit = "" if deployment.commit is None else f", pinned to {deployment.commit}"
    return f"{deployment.spec.model.uri}{commit}"
