"""Names and labels of children: the one place that knows them."""

from __future__ import annotations

from trimtab_operator.resource.spec import InferenceDeployment

MANAGED_BY = "trimtab-operator"
DEPLOYMENT_LABEL = "trimtab.dev/deployment"
GROUP_LABEL = "trimtab.dev/group"  # the replica's ordinal
ROLE_LABEL = "trimtab.dev/role"
REVISION_LABEL = "trimtab.dev/revision"  # hash of the rendered pod template
LEADER = "leader"
WORKER = "worker"
FACTS_COMPONENT = "model-facts"  # the Job that reads a model, its pod and what it found

HTTP_PORT = 8000  # docs/reference/contract.md, section 7
ADMIN_PORT = 8001
RENDEZVOUS_PORT = 29500  # where the ranks of a group meet; PyTorch's customary port


def common_labels(deployment: InferenceDeployment) -> dict[str, str]:
    """On every child."""
    return {
        "app.kubernetes.io/name": "trimtab-engine",
        "app.kubernetes.io/instance": deployment.name,
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/part-of": "trimtab",
        "app.kubernetes.io/managed-by": MANAGED_BY,
        DEPLOYMENT_LABEL: deployment.name,
    }


def leader_selector(deployment: InferenceDeployment) -> dict[str, str]:
    """Selects the leader pods of all groups: one pod per replica, so that an autoscaler's average is per replica."""
    return {DEPLOYMENT_LABEL: deployment.name, ROLE_LABEL: LEADER}


def group_selector(deployment: InferenceDeployment, ordinal: int) -> dict[str, str]:
    """Selects the leader pod of one group."""
    return {**leader_selector(deployment), GROUP_LABEL: str(ordinal)}


def worker_selector(deployment: InferenceDeployment, ordinal: int) -> dict[str, str]:
    """Selects the worker pods of one group. Neither clients' Service nor `status.selector` selects them."""
    return {DEPLOYMENT_LABEL: deployment.name, ROLE_LABEL: WORKER, GROUP_LABEL: str(ordinal)}


def children_selector(name: str) -> str:
    """Label selector, as text, of everything that belongs to one deployment."""
    return f"app.kubernetes.io/managed-by={MANAGED_BY},{DEPLOYMENT_LABEL}={name}"


def selector_text(labels: dict[str, str]) -> str:
    """A set of labels as the text of a label selector."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def group_name(deployment: InferenceDeployment, ordinal: int) -> str:
    """Name of a group's StatefulSet and rendezvous Service; its pod is NAME-gN-0."""
    return f"{deployment.name}-g{ordinal}"


def worker_set_name(deployment: InferenceDeployment, ordinal: int) -> str:
    """Name of the StatefulSet of a group's workers; its pods are NAME-gN-w-0 and up."""
    return f"{group_name(deployment, ordinal)}-w"


def service_name(deployment: InferenceDeployment) -> str:
    """Name of the Service that clients use."""
    return deployment.name


def account_name(deployment: InferenceDeployment) -> str:
    """Name of the ServiceAccount of its pods."""
    return f"{deployment.name}-engine"


def meeting_secret_name(deployment: InferenceDeployment) -> str:
    """Name of the Secret that the pods of a replica of several share."""
    return f"{deployment.name}-meeting"


def facts_name(deployment: InferenceDeployment) -> str:
    """Name of the Job that reads the model, and of the ConfigMap with what it found."""
    return f"{deployment.name}-facts"


def rollout_config_map_name(deployment: InferenceDeployment) -> str:
    """Name of the ConfigMap with the last form that worked, and what became of a change."""
    return f"{deployment.name}-rollout"


def tuning_config_map_name(deployment: InferenceDeployment) -> str:
    """Name of the ConfigMap with what tuning remembers."""
    return tuning_name_of(deployment.name)


def tuning_name_of(name: str) -> str:
    """The same, by the resource's name."""
    return f"{name}-tuning"
