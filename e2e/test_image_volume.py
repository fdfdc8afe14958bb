"""Scenario: nodes mount the model as an image volume, on clusters that support it and pull from a registry."""

from __future__ import annotations

import re

import pytest
from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.target import Target

FIRST_VERSION = (1, 35)  # image volumes without a feature gate
FOLDER = "/models/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def image(apply: Apply, target: Target) -> str:
    """Return the model's image by digest, as pulled by a node."""
    found = re.match(r"v(\d+)\.(\d+)", target.version)
    if found is None or (int(found[1]), int(found[2])) < FIRST_VERSION:
        pytest.skip(f"Kubernetes {target.version} has no image volumes")
    deployment = apply("plain")
    deployment.ready()
    (status,) = deployment.pod()["status"]["containerStatuses"]
    name = str(status["imageID"])
    if not re.fullmatch(r"[^/]+/.+@sha256:[0-9a-f]{64}", name) or not status["image"].startswith(name.split("/")[0]):
        pytest.skip(f"these nodes got the image by a copy, not from a registry: {name}")
    return name


@pytest.fixture(scope="module")
def mounted(image: str, apply: Apply) -> Deployment:
    deployment = apply("mounted", model={"uri": f"oci://{image}", "oci": {"imageVolume": True, "folder": FOLDER}})
    deployment.ready()
    return deployment


def test_image_volume_model_is_served(mounted: Deployment, image: str) -> None:
    assert EXPECTED in ask(mounted).text
    volumes = {volume["name"]: volume for volume in mounted.pod()["spec"]["volumes"]}
    assert volumes["model"]["image"] == {"reference": image, "pullPolicy": "IfNotPresent"}
