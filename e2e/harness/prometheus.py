"""A Prometheus in a scenario's namespace that scrapes engines and that the operator can query.

Debian's build has no `kubernetes_sd_configs`, so the leaders' addresses are static targets in its configuration; call
`scrape` again after a pod is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from harness.kube import Kube, KubectlError, Manifest
from harness.wait import NotYet, Waiter

NAME = "prometheus"
PORT = 9090
READY_SECONDS = 90.0
API_PORT = 8000
USER = 65532


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """One server of the image `image`, in `namespace`."""

    kube: Kube
    namespace: str
    image: str
    scrape_seconds: int = 5

    def scrape(self, pods: Iterable[Manifest], *, jobs: tuple[str, ...] = ("engines",)) -> None:
        """Start a server that scrapes these pods for each job and wait until it is ready. Replaces a running one."""
        self.stop()
        for manifest in (self._configuration(list(pods), jobs), self._pod(), self._service()):
            self.kube.apply(manifest, namespace=self.namespace)
        Waiter(self.kube, self.namespace).until("Prometheus answers", self._answers, deadline_seconds=READY_SECONDS)

    def stop(self) -> None:
        """Delete the server's pod. Its Service, and thereby its address, stays."""
        self.kube.delete("pod", NAME, self.namespace, wait=True)

    @property
    def url(self) -> str:
        """URL with the Service's IP address, since not every test cluster has DNS."""
        service = self.kube.get("service", NAME, self.namespace)
        if service is None:
            raise NotYet("there is no Service of Prometheus yet")
        return f"http://{service['spec']['clusterIP']}:{PORT}"

    def _answers(self) -> None:
        try:
            self.kube.pod_http(self.namespace, NAME, PORT, "/-/ready")
        except KubectlError as error:
            raise NotYet(str(error)) from error

    def _configuration(self, pods: list[Manifest], jobs: tuple[str, ...]) -> Manifest:
        targets = [
            {
                "targets": [f"{pod['status']['podIP']}:{API_PORT}"],
                "labels": {"pod": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]},
            }
            for pod in pods
        ]
        wanted = {
            "global": {"scrape_interval": f"{self.scrape_seconds}s"},
            "scrape_configs": [{"job_name": job, "static_configs": targets} for job in jobs],
        }
        data = {"prometheus.yml": json.dumps(wanted)}  # JSON is YAML
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": data}

    def _pod(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": NAME, "labels": {"app": NAME}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
                "containers": [
                    {
                        "name": NAME,
                        "image": self.image,
                        "imagePullPolicy": "IfNotPresent",
                        "args": [
                            "--config.file=/etc/prometheus/prometheus.yml",
                            "--storage.tsdb.path=/data",
                            f"--web.listen-address=0.0.0.0:{PORT}",
                        ],
                        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
                        "volumeMounts": [
                            {"name": "configuration", "mountPath": "/etc/prometheus"},
                            {"name": "data", "mountPath": "/data"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "configuration", "configMap": {"name": NAME}},
                    {"name": "data", "emptyDir": {}},
                ],
            },
        }

    def _service(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME},
            "spec": {"selector": {"app": NAME}, "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}]},
        }
