"""A claim over a folder of a node, with no class, so that no provisioner is needed; and work on it as root, as no
kubelet gives a folder of its node to another group."""

from __future__ import annotations

from dataclasses import dataclass

from harness.kube import Kube, Manifest
from harness.wait import NotYet, Waiter

MOUNT = "/claim"
"""Where scripts see the folder."""
SCRIPT_SECONDS = 120.0  # a model of half a gigabyte is copied


@dataclass(frozen=True, slots=True)
class FolderClaim:
    """The claim and its volume. `node`: the one whose folder it is, so that all who use it run there; on any other they
    would find a folder of that name that is empty."""

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
        """Runs the script once, as root, with the folder at MOUNT."""
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
        """Anew: a volume that an earlier run left belongs to a claim that is gone."""
        self.delete_volume(kube)
        kube.apply(self.persistent_volume())
        kube.apply(self.claim(), namespace=namespace)

    def delete_volume(self, kube: Kube) -> None:
        """The claim goes with its namespace."""
        kube.delete("persistentvolume", self.volume)

    def run(self, kube: Kube, namespace: str, *, name: str, image: str, script: str) -> None:
        """Run the script in a pod of that name and wait for its end. What it said is in the error where it fails."""
        kube.apply(self.pod(name, image, script), namespace=namespace)

        def ended() -> None:
            phase = ((kube.get("pod", name, namespace) or {}).get("status") or {}).get("phase")
            assert phase != "Failed", kube.logs(namespace, name)
            if phase != "Succeeded":
                raise NotYet(f"pod {name} is {phase}")

        Waiter(kube, namespace).until(f"pod {name} has ended", ended, deadline_seconds=SCRIPT_SECONDS)
        kube.delete("pod", name, namespace, wait=True)
