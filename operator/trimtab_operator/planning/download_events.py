"""Events about model downloads: one when a replica starts and one when it finishes its download. Pure.

The previous state is read from the status, so a restarted operator does not repeat Events. The engine reports a
download that started and ended between two observations while it loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab_operator.observed.actions import Event
from trimtab_operator.observed.phases import DOWNLOAD, EngineView
from trimtab_operator.resource.spec import InferenceDeployment


def download_events(deployment: InferenceDeployment, views: Mapping[str, EngineView]) -> tuple[Event, ...]:
    """Return Events for downloads that started or finished since the status was written."""
    groups = deployment.status.get("groups") or []
    loads = {group.get("name"): group.get("load") or {} for group in groups}
    found = []
    for name, view in sorted(views.items()):
        if view.load is None and view.applied is None:
            continue  # unknown: the engine neither loads nor serves
        before = loads.get(name, {})
        is_downloading = view.load is not None and view.load[0] == DOWNLOAD
        was_downloading = before.get("stage") == DOWNLOAD
        was_quick = view.downloaded_bytes is not None and "downloadedBytes" not in before
        if is_downloading and not was_downloading:
            found.append(Event("Normal", "DownloadStarted", f"{name} downloads {_model(deployment)}", view.instance))
        elif (was_downloading or was_quick) and not is_downloading:
            what = f"{name} downloaded {_model(deployment)}"
            how = f": {view.load_message}" if view.downloaded_bytes is not None and view.load_message else ""
            found.append(Event("Normal", "Downloaded", what + how, view.instance))
    return tuple(found)


def _model(deployment: InferenceDeployment) -> str:
    commit = "" if deployment.commit is None else f", pinned to {deployment.commit}"
    return f"{deployment.spec.model.uri}{commit}"
