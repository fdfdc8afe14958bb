"""Validating webhook over TLS, and its certificates: Secret, server, caBundle.

The rules are in planning/admission.py.
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

MAX_REVIEW_BYTES = 4 << 20  # etcd stores objects up to 1.5 MiB; a review has the new and the old object
CONTEXT_TIMEOUT_SECONDS = 2.0  # for reading the cluster state: the API server's webhook timeout is 5 s
DEREGISTRATION_SECONDS = 5.0  # until every API server has removed the endpoint
MAX_SECRET_ATTEMPTS = 3  # per refresh: after a lost race the stored certificate is valid
REFRESH_SECONDS = 60.0  # also the time until a reset caBundle is restored


class Webhook:
    """Webhook server and its certificates. Call `start` once, then `maintain` until the process ends."""

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
        """Listen on all interfaces. The caller must clean up the runner."""
        await self.refresh()
        application = web.Application(client_max_size=MAX_REVIEW_BYTES)
        application.router.add_post("/validate", self._validate)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=port, ssl_context=self._context).start()
        self.is_serving = True
        return runner

    async def withdraw(self, *, after_seconds: float = DEREGISTRATION_SECONDS) -> None:
        """Become unready but keep serving for a while: API servers learn of the removed endpoint with a delay."""
        self.is_serving = False
        await asyncio.sleep(after_seconds)

    async def maintain(self) -> None:
        """Renew certificates before they expire, and restore a caBundle that was reset, until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
            except (*CONNECTION_ERRORS, NotYet) as error:
                logger.warning("webhook certificates could not be refreshed", extra={"error": str(error)})
            except Exception:  # e.g. invalid data in the Secret: certificates must not expire unnoticed weeks later
                logger.exception("webhook certificates could not be refreshed")

    async def refresh(self) -> None:
        """Load or renew the certificates, serve them, and publish the caBundle."""
        current = await self._load_or_renew(datetime.now(UTC))
        if current != self._loaded:
            self._load(current)
        await self._publish(current.bundle)

    async def _load_or_renew(self, now: datetime) -> Certificates:
        """Return the stored certificates, renewed if needed. The first of several concurrent writers wins, and the
        others use its result.

        Raises:
            NotYet: Concurrent writers won all MAX_SECRET_ATTEMPTS attempts.
        """
        made = certificates.issue(self._names, now=now) if self._loaded is None else self._loaded
        for _ in range(MAX_SECRET_ATTEMPTS):
            data = await self._cluster.get_or_create_secret(self._namespace, self._secret, made.as_secret())
            stored = Certificates.from_secret(data)
            successor = (
                certificates.issue(self._names, now=now)
                if stored is None
                else certificates.renew_if_needed(stored, self._names, now=now)
            )
            if successor is None:
                assert stored is not None
                return stored
            if await self._cluster.replace_secret(self._namespace, self._secret, data, successor.as_secret()):
                logger.info("webhook certificate renewed")
                return successor
        raise NotYet("other operator pods renew the webhook certificates at the same time; it is retried")

    def _load(self, current: Certificates) -> None:
        """Use the certificates for new connections. The ssl module reads keys from files only."""
        with tempfile.TemporaryDirectory(prefix="webhook-") as folder:
            leaf, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            leaf.write_bytes(current.leaf + current.ca)
            key.touch(mode=0o600)
            key.write_bytes(current.key)
            self._context.load_cert_chain(leaf, key)
        self._loaded = current

    async def _publish(self, bundle: bytes) -> None:
        """Set the caBundle of every webhook in the chart's configuration if it differs."""
        if self._configuration is None:
            return
        kind = "ValidatingWebhookConfiguration"
        present = await self._cluster.get(kind, None, self._configuration)
        if present is None:
            logger.warning(
                "the ValidatingWebhookConfiguration is missing", extra={"configuration": self._configuration}
            )
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
            known = await self._cluster_context(asked["request"])
            answer = review(
                asked, default_image=self._default_image, allowed_privileges=self._allowed_privileges, known=known
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            return web.json_response({"message": f"not an AdmissionReview: {error!r}"}, status=400)
        return web.json_response(answer)

    async def _cluster_context(self, asked: Mapping[str, Any]) -> ClusterContext:
        """Return the cluster state for the review. Best effort: checks without it are left to the reconcile loop."""
        if not should_validate(asked):
            return NO_CLUSTER_CONTEXT
        metadata = asked["object"]["metadata"]
        try:
            async with asyncio.timeout(CONTEXT_TIMEOUT_SECONDS):
                nodes = await self._nodes.list_nodes()
                if asked["operation"] == "CREATE":
                    return ClusterContext(nodes=nodes)
                found = await self._cluster.get("ConfigMap", metadata["namespace"], f"{metadata['name']}-facts")
                is_ours = found is not None and is_owned(found, str(metadata.get("uid")))
                return ClusterContext(facts=found if is_ours else None, nodes=nodes)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            logger.warning(
                "the cluster state could not be read; the webhook validates the spec only",
                extra={"error": str(error) or "timeout"},
            )
            return NO_CLUSTER_CONTEXT
