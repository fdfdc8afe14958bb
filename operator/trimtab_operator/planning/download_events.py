"""What is told of downloads: an Event when a replica begins to fetch its model, and one when it has it. Pure.

What was so before is what the status says: an operator that starts in the middle tells neither twice. A download that
began and ended between two looks is told of by the engine while it loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab_operator.observed.actions import Note
from trimtab_operator.observed.phases import DOWNLOAD, EngineView
from trimtab_operator.resource.spec import InferenceDeployment


def download_notes(deployment: InferenceDeployment, views: Mapping[str, EngineView]) -> tuple[Note, ...]:
    """What has begun or ended since the status was written."""
    groups = deployment.status.get("groups") or []
    said = {group.get("name"): group.get("load") or {} for group in groups}
    found = []
    for name, view in sorted(views.items()):
        if view.load is None and view.applied is None:
            continue  # it neither loads nor serves: nobody knows
        before = said.get(name, {})
        is_downloading = view.load is not None and view.load[0] == DOWNLOAD
        was_downloading = before.get("stage") == DOWNLOAD
        was_quick = view.downloaded_bytes is not None and "downloadedBytes" not in before
        if is_downloading and not was_downloading:
            found.append(Note("Normal", "DownloadStarted", f"{name} fetches {_model(deployment)}", view.instance))
        elif (was_downloading or was_quick) and not is_downloading:
            what = f"{name} has {_model(deployment)}"
            how = f": {view.load_message}" if view.downloaded_bytes is not None and view.load_message else ""
            found.append(Note("Normal", "Downloaded", what + how, view.instance))
    return tuple(found)


def _model(deployment: InferenceDeployment) -> str:
    commit = "" if deployment.commit is None else f", pinned to {deployment.commit}"
    return f"{deployment.spec.model.uri}{commit}"
