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
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from trimtab_operator.builders.admin_token import SECRET_KEY, admin_token, new_secret
from trimtab_operator.errors import NotYet
from trimtab_operator.kube import certificates
from trimtab_operator.kube.certificates import Certificates
from trimtab_operator.kube.client import Cluster, is_owned
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.planning.admission import NO_CLUSTER_CONTEXT, ClusterContext, allow, review, should_validate
from trimtab_operator.planning.model_facts import verify_facts
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.limits import shorten
from trimtab_operator.resource.spec import class_of

logger = logging.getLogger(__name__)

# The port is reachable without authentication, so the cost of any sequence of requests is bounded.
MAX_REVIEW_BYTES = 3 << 20  # the API server's limit for requests; a review has the new and the old object
MAX_REVIEW_VALUES = 200_000  # two specs of the maximum size and their managedFields; about 40 MiB when parsed
MAX_BUFFERED_BYTES = 12 << 20  # of all bodies that are being received or wait for a review
REVIEW_TIMEOUT_SECONDS = 4.0  # from the first byte to the verdict: the API server's webhook timeout is 5 s
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
        state_secret: str,
        configuration: str | None,
        default_image: str | None,
        allowed_privileges: frozenset[str] = NO_PRIVILEGES,
        has_router: bool = True,
        operator_class: str | None = None,
        on_review: Callable[[str, float], None] = lambda _verdict, _seconds: None,
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._namespace = namespace
        self._secret = secret
        self._state_secret = state_secret
        self._configuration = configuration
        self._default_image = default_image
        self._allowed_privileges = allowed_privileges
        self._has_router = has_router
        self._operator_class = operator_class
        self._on_review = on_review
        """Receives the verdict and the seconds of each review."""
        self.expires_at = 0.0
        """Unix time at which the served certificate expires."""
        self._names = certificates.service_names(service, namespace)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded: Certificates | None = None
        self._buffered = 0
        """Bytes of all bodies that are being received or wait for a review."""
        self._reviewing = asyncio.Lock()
        """One review at a time: reviews share one interpreter, and each may take 40 MiB."""
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
        self.expires_at = certificates.expiry_of(current.leaf).timestamp()

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
        body = bytearray()
        began, verdict = time.monotonic(), "failed"
        try:
            async with asyncio.timeout(REVIEW_TIMEOUT_SECONDS):
                await self._receive(request, body)
                async with self._reviewing:
                    answer = await self._answer(body)
            verdict = "allowed" if answer["response"]["allowed"] else "denied"
            return web.json_response(answer)
        except TimeoutError:
            return web.json_response({"message": "the review took too long; retry"}, status=503)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"not an AdmissionReview: {shorten(repr(error))}"
            return web.json_response({"message": message}, status=400)
        finally:
            self._buffered -= len(body)
            self._on_review(verdict, time.monotonic() - began)

    async def _receive(self, request: web.Request, body: bytearray) -> None:
        """Append the request's body to `body`.

        Raises:
            HTTPRequestEntityTooLarge: The body is too large.
            HTTPServiceUnavailable: The bodies of all requests together are too large.
        """
        async for chunk in request.content.iter_any():
            if len(body) + len(chunk) > MAX_REVIEW_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_REVIEW_BYTES, len(body) + len(chunk))
            if self._buffered + len(chunk) > MAX_BUFFERED_BYTES:
                raise web.HTTPServiceUnavailable(text="too many reviews at the same time; retry")
            self._buffered += len(chunk)
            body += chunk

    async def _answer(self, body: bytearray) -> dict[str, Any]:
        """Return the response to the AdmissionReview. Parsing and validation run in a worker thread, so that the event
        loop keeps serving.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RecursionError: The body is not an AdmissionReview.
        """
        if sum(body.count(mark) for mark in (b",", b"{", b"[")) > MAX_REVIEW_VALUES:
            raise ValueError(f"more than {MAX_REVIEW_VALUES:,} values")
        asked = await asyncio.to_thread(json.loads, body)
        if class_of(asked["request"].get("object") or {}) != self._operator_class:  # another operator's webhook
            return allow(asked["request"])
        known = await self._cluster_context(asked["request"])
        return await asyncio.to_thread(
            review,
            asked,
            default_image=self._default_image,
            allowed_privileges=self._allowed_privileges,
            has_router=self._has_router,
            known=known,
        )

    async def _key(self, uid: str) -> str:
        """Return the key with which the operator signs the state of a resource; a random one if it has none yet."""
        secret = await self._cluster.get("Secret", self._namespace, self._state_secret)
        stored = ((secret or {}).get("data") or {}).get(SECRET_KEY)
        return admin_token(new_secret() if stored is None else base64.b64decode(stored), uid)

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
                uid = str(metadata.get("uid"))
                is_ours = found is not None and is_owned(found, uid) and verify_facts(found, key=await self._key(uid))
                return ClusterContext(facts=found if is_ours else None, nodes=nodes)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            logger.warning(
                "the cluster state could not be read; the webhook validates the spec only",
                extra={"error": str(error) or "timeout"},
            )
            return NO_CLUSTER_CONTEXT
