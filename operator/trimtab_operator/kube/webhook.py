"""Serves the validating webhook over TLS and keeps its certificates: Secret, server, caBundle.

The verdicts are those of planning/admission.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from trimtab_operator.errors import NotYet
from trimtab_operator.kube import certificates
from trimtab_operator.kube.certificates import Certificates
from trimtab_operator.kube.client import Cluster, is_owned
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.planning.admission import NO_CLUSTER_CONTEXT, ClusterContext, review, should_validate
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES

logger = logging.getLogger(__name__)

MAX_REVIEW_BYTES = 4 << 20  # etcd holds objects of 1.5 MiB; a review carries the new and the old one
LOOK_SECONDS = 2.0  # for what is known beside the resource: the API server waits 5 s for the verdict
LEAVE_SECONDS = 5.0  # until every API server knows that the pod goes; the others answer then
AGREEMENT_LOOKS = 3  # at what is stored, before the next refresh: who was overtaken finds what is good
REFRESH_SECONDS = 60.0  # how soon a caBundle that somebody reset is set again


class Webhook:
    """The server and its certificates. `start` once, then `keep` until the process ends."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: Nodes,
        *,
        namespace: str,
        service: str,
        secret: str,
        configuration: str | None,
        default_image: str | None,
        allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._namespace = namespace
        self._secret = secret
        self._configuration = configuration
        self._default_image = default_image
        self._allowed_privileges = allowed_privileges
        self._names = certificates.service_names(service, namespace)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded: Certificates | None = None
        self.is_serving = False

    async def start(self, port: int) -> web.AppRunner:
        """Listen on all interfaces. The caller cleans the runner up."""
        await self.refresh()
        application = web.Application(client_max_size=MAX_REVIEW_BYTES)
        application.router.add_post("/validate", self._validate)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=port, ssl_context=self._context).start()
        self.is_serving = True
        return runner

    async def leave(self, *, after_seconds: float = LEAVE_SECONDS) -> None:
        """Answer on for a moment, but be found no more: API servers learn of it a little later than we are told."""
        self.is_serving = False
        await asyncio.sleep(after_seconds)

    async def keep(self) -> None:
        """Renew certificates before they end, and set the caBundle again when it was reset."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
            except (*CONNECTION_ERRORS, NotYet) as error:
                logger.warning("the webhook's certificates could not be checked", extra={"error": str(error)})
            except Exception:  # whatever somebody wrote there: certificates must not end unnoticed, weeks later
                logger.exception("the webhook's certificates could not be checked")

    async def refresh(self) -> None:
        """Read or make the certificates, serve them, and tell the API server whom to trust."""
        current = await self._agreed(datetime.now(UTC))
        if current != self._loaded:
            self._load(current)
        await self._publish(current.bundle)

    async def _agreed(self, now: datetime) -> Certificates:
        """What all operators' pods serve: what is stored, or a successor where that is no good any more. Of several who
        store one at once the first has its way, and the others take it. Raises NotYet."""
        made = certificates.fresh(self._names, now=now) if self._loaded is None else self._loaded
        for _ in range(AGREEMENT_LOOKS):
            data = await self._cluster.secret(self._namespace, self._secret, made.as_secret())
            stored = Certificates.from_secret(data)
            successor = (
                certificates.fresh(self._names, now=now)
                if stored is None
                else certificates.renewed(stored, self._names, now=now)
            )
            if successor is None:
                assert stored is not None
                return stored
            if await self._cluster.replace_secret(self._namespace, self._secret, data, successor.as_secret()):
                logger.info("webhook certificate renewed")
                return successor
        raise NotYet("others renew the webhook's certificates at the same time")

    def _load(self, current: Certificates) -> None:
        """New connections get the new certificate. The ssl module reads keys from files only."""
        with tempfile.TemporaryDirectory(prefix="webhook-") as folder:
            leaf, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            leaf.write_bytes(current.leaf + current.ca)
            key.touch(mode=0o600)
            key.write_bytes(current.key)
            self._context.load_cert_chain(leaf, key)
        self._loaded = current

    async def _publish(self, bundle: bytes) -> None:
        """Set the caBundle of every webhook in the configuration that the chart installed, if it is another one."""
        if self._configuration is None:
            return
        kind = "ValidatingWebhookConfiguration"
        present = await self._cluster.get(kind, None, self._configuration)
        if present is None:
            logger.warning("the webhook configuration is missing", extra={"configuration": self._configuration})
            return
        wanted = base64.b64encode(bundle).decode()
        stale = [
            {"name": hook["name"], "clientConfig": {"caBundle": wanted}}
            for hook in present.get("webhooks") or []
            if hook["clientConfig"].get("caBundle") != wanted
        ]
        if stale:
            await self._cluster.patch(kind, None, self._configuration, {"webhooks": stale})
            logger.info("caBundle set", extra={"configuration": self._configuration})

    async def _validate(self, request: web.Request) -> web.Response:
        try:
            asked = await request.json()
            known = await self._surroundings(asked["request"])
            answer = review(
                asked, default_image=self._default_image, allowed_privileges=self._allowed_privileges, known=known
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            return web.json_response({"message": f"not an AdmissionReview: {error!r}"}, status=400)
        return web.json_response(answer)

    async def _surroundings(self, asked: Mapping[str, Any]) -> ClusterContext:
        """What is known beside the resource. Best effort: what cannot be seen in time is left to the loop."""
        if not should_validate(asked):
            return NO_CLUSTER_CONTEXT
        metadata = asked["object"]["metadata"]
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                nodes = await self._nodes.present()
                if asked["operation"] == "CREATE":
                    return ClusterContext(nodes=nodes)
                found = await self._cluster.get("ConfigMap", metadata["namespace"], f"{metadata['name']}-facts")
                is_ours = found is not None and is_owned(found, str(metadata.get("uid")))
                return ClusterContext(facts=found if is_ours else None, nodes=nodes)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            logger.warning("the webhook judges by the spec alone", extra={"error": str(error) or "timeout"})
            return NO_CLUSTER_CONTEXT
