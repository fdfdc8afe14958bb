"""The Pod Security Standard `restricted`, as kubernetes.io/docs/concepts/security/pod-security-standards lists it.

What it says of a pod is what an API server would say that enforces `pod-security.kubernetes.io/enforce: restricted`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VOLUME_TYPES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
}  # fmt: skip
SECCOMP_TYPES = ("RuntimeDefault", "Localhost")
HANDLERS = ("httpGet", "tcpSocket")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def violations(pod: Mapping[str, Any]) -> list[str]:
    """What of a pod's template (its metadata and spec) the profile forbids; empty: the pod is admitted."""
    return [*_of_pod(pod["spec"], pod.get("metadata", {})), *_of_containers(pod["spec"])]


def _of_pod(spec: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", ()):
        for source in volume.keys() - {"name"} - VOLUME_TYPES:
            yield f"volume {volume['name']}: {source}"
    security = spec.get("securityContext", {})
    for sysctl in security.get("sysctls", ()):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    if security.get("runAsUser") == 0:
        yield "the pod's runAsUser"
    for name, value in metadata.get("annotations", {}).items():
        if name.startswith("container.apparmor.security.beta.kubernetes.io/") and value != "runtime/default":
            yield f"annotation {name}"


def _of_containers(spec: Mapping[str, Any]) -> Iterator[str]:
    for_all = spec.get("securityContext", {})
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            own = container.get("securityContext", {})
            for said in (*_privileges(own, for_all), *_reach(container)):
                yield f"container {container['name']}: {said}"


def _privileges(own: Mapping[str, Any], for_all: Mapping[str, Any]) -> Iterator[str]:
    capabilities = own.get("capabilities", {})
    seccomp = own.get("seccompProfile") or for_all.get("seccompProfile") or {}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("runAsNonRoot", for_all.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot"
    if own.get("runAsUser") == 0:
        yield "runAsUser"
    if seccomp.get("type") not in SECCOMP_TYPES:
        yield "seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if own.get("seLinuxOptions") or own.get("windowsOptions"):
        yield "seLinuxOptions or windowsOptions"


def _reach(container: Mapping[str, Any]) -> Iterator[str]:
    """Ports of the node, and probes or hooks that name a host: newer versions of the profile forbid these as well."""
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    hooks = [container.get(probe, {}) for probe in PROBES]
    hooks += [container.get("lifecycle", {}).get(moment, {}) for moment in ("postStart", "preStop")]
    if any("host" in hook.get(handler, {}) for hook in hooks for handler in HANDLERS):
        yield "a probe or hook of another host"
