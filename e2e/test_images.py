"""Scenario: a vision model answers requests with images from the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import Apply, Remove
from harness.claims import FolderClaim
from harness.deployment import Deployment
from harness.install import Installation
from harness.kube import Kube
from harness.nodes import pod_nodes
from harness.service import port_forward
from harness.target import Target
from harness.vision_model import (
    DELIMITER_TOKENS,
    MAX_IMAGES,
    NAME,
    NUM_TOKENS,
    build_script,
    message,
    png,
    spec_changes,
)
from prometheus_client.parser import text_string_to_metric_families

API_PORT = 8000
QUESTION = "Which colour is it?"
RED, BLUE = png(255, 0, 0), png(0, 0, 255)


@pytest.fixture(scope="module")
def claim(target: Target, installation: Installation, kube: Kube, namespace: str) -> Iterator[str]:
    """Return the name of a claim with the model; its files are removed from the node afterwards."""
    if not target.is_own:
        pytest.skip("CLUSTER=current: this scenario writes to a node's folder, so it needs the cluster of e2e/cluster")
    folder = FolderClaim("seeing", "trimtab-e2e-images", "1Gi", node=pod_nodes(kube)[0])
    folder.make(kube, namespace)
    image = installation.images.model
    folder.run(kube, namespace, name="fill", image=image, script=build_script())
    yield folder.name
    folder.run(kube, namespace, name="empty", image=image, script="rm -rf /claim/*")
    folder.delete_volume(kube)


def _hits(deployment: Deployment, kube: Kube) -> float:
    text = kube.pod_http(deployment.namespace, deployment.pod()["metadata"]["name"], API_PORT, "/metrics")
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == "vllm:mm_cache_hits_total")


def test_repeated_image_hits_multimodal_cache(apply: Apply, remove: Remove, claim: str, kube: Kube) -> None:
    deployment = apply("seeing", **spec_changes(claim))
    deployment.ready()
    name, _, port = deployment.service()

    def ask(client: openai.OpenAI, *images: bytes) -> Any:
        messages: Any = [message(QUESTION, *images)]
        return client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )

    with (
        port_forward(kube, deployment.namespace, f"svc/{name}", port) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=180.0, max_retries=0) as client,
    ):
        text_only, red, both = ask(client), ask(client, RED), ask(client, RED, BLUE)
        tokens = [answer.usage.prompt_tokens for answer in (text_only, red, both)]
        assert [more - tokens[0] for more in tokens] == [
            0,
            NUM_TOKENS + DELIMITER_TOKENS,
            2 * (NUM_TOKENS + DELIMITER_TOKENS),
        ]
        assert all(answer.usage.completion_tokens == 8 for answer in (text_only, red, both))
        again = ask(client, RED)
        assert again.choices[0].message.content == red.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match=f"have 3 images; the limit is {MAX_IMAGES} per prompt"):
            ask(client, RED, BLUE, RED)
    assert _hits(deployment, kube) >= 2  # the red image: with the blue one, and when repeated
    remove(deployment)
