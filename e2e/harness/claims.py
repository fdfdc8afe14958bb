"""PersistentVolumeClaims backed by a node's folder, so that no provisioner is needed.

Scripts on the folder run as root, since the kubelet does not apply fsGroup to hostPath volumes.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.kube import Kube, Manifest
from harness.wait import NotYet, Waiter

MOUNT = "/claim"
"""The folder's mount path in script pods."""
SCRIPT_SECONDS = 120.0  # a model of half a gigabyte is copied


@dataclass(frozen=True, slots=True)
class FolderClaim:
    """A claim and its volume. All pods that use it run on `node`: elsewhere the folder would be empty."""

    name: str
    volume: str
    size: str
    node: str
    access_mode: str = "ReadWriteOnce"

    def persistent_volume(self) -> Manifest:
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [self.node]}
        spec: Manifest = {
            "capacity": {"storage": self.size},
            "accessModes": [self.access_mode],
            "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/var/{self.volume}", "type": "DirectoryOrCreate"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        }
        return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.volume}, "spec": spec}

    def claim(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": self.name},
            "spec": {
                "accessModes": [self.access_mode],
                "storageClassName": "",
                "volumeName": self.volume,
                "resources": {"requests": {"storage": self.size}},
            },
        }

    def pod(self, name: str, image: str, script: str) -> Manifest:
        """Return a pod that runs the script once, as root, with the folder at MOUNT."""
        container: Manifest = {"name": name, "image": image, "command": ["sh", "-c", script]}
        container["volumeMounts"] = [{"name": "claim", "mountPath": MOUNT}]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "securityContext": {"runAsUser": 0},
                "containers": [container],
                "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": self.name}}],
            },
        }

    def make(self, kube: Kube, namespace: str) -> None:
        """Create volume and claim. A volume left by an earlier run is bound to a deleted claim, so it is replaced."""
        self.delete_volume(kube)
        kube.apply(self.persistent_volume())
        kube.apply(self.claim(), namespace=namespace)

    def delete_volume(self, kube: Kube) -> None:
        """Delete the volume. The claim is deleted with its namespace."""
        kube.delete("persistentvolume", self.volume)

    def run(self, kube: Kube, namespace: str, *, name: str, image: str, script: str) -> None:
        """Run the script in a pod of that name and wait for it to succeed; a failure includes the pod's log."""
        kube.apply(self.pod(name, image, script), namespace=namespace)

        def ended() -> None:
            phase = ((kube.get("pod", name, namespace) or {}).get("status") or {}).get("phase")
            assert phase != "Failed", kube.logs(namespace, name)
            if phase != "Succeeded":
                raise NotYet(f"pod {name} is {phase}")

        Waiter(kube, namespace).until(f"pod {name} has succeeded", ended, deadline_seconds=SCRIPT_SECONDS)
        kube.delete("pod", name, namespace, wait=True)
