"""Names, labels and ports of children."""

from __future__ import annotations

from trimtab_operator.resource.spec import InferenceDeployment

RENDEZVOUS_SECRET_NAME = "trimtab-rendezvous"  # noqa: S105 - of all resources in a namespace
MANAGED_BY = "trimtab-operator"
DEPLOYMENT_LABEL = "trimtab.dev/deployment"
GROUP_LABEL = "trimtab.dev/group"  # the replica's ordinal
ROLE_LABEL = "trimtab.dev/role"
REVISION_LABEL = "trimtab.dev/revision"  # hash of the rendered pod template
LEADER = "leader"
WORKER = "worker"
COMPONENT_LABEL = "app.kubernetes.io/component"
ROUTER_COMPONENT = "router"
FACTS_COMPONENT = "model-facts"  # the Job that reads a model, its pod and its ConfigMap

HTTP_PORT = 8000  # docs/reference/contract.md, section 7
ADMIN_PORT = 8001
ROUTER_ADMIN_PORT = 8002  # probes, metrics and demand of a router; its API port is HTTP_PORT
RENDEZVOUS_PORT = 29500  # rendezvous of the ranks of a group; PyTorch's default port


def common_labels(deployment: InferenceDeployment) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        "app.kubernetes.io/name": "trimtab-engine",
        "app.kubernetes.io/instance": deployment.name,
        COMPONENT_LABEL: "engine",
        "app.kubernetes.io/part-of": "trimtab",
        "app.kubernetes.io/managed-by": MANAGED_BY,
        DEPLOYMENT_LABEL: deployment.name,
    }


def router_labels(deployment: InferenceDeployment) -> dict[str, str]:
    """Return the labels of the router's children and pods. They have no role, so no selector of engines matches."""
    return {
        **common_labels(deployment),
        "app.kubernetes.io/name": "trimtab-router",
        COMPONENT_LABEL: ROUTER_COMPONENT,
    }


def router_selector(deployment: InferenceDeployment) -> dict[str, str]:
    """Return the selector of the router's pods."""
    return {DEPLOYMENT_LABEL: deployment.name, COMPONENT_LABEL: ROUTER_COMPONENT}


def leader_selector(deployment: InferenceDeployment) -> dict[str, str]:
    """Return the selector of all leader pods: one per replica, so that an autoscaler's average is per replica."""
    return {DEPLOYMENT_LABEL: deployment.name, ROLE_LABEL: LEADER}


def group_selector(deployment: InferenceDeployment, ordinal: int) -> dict[str, str]:
    """Return the selector of the leader pod of one group."""
    return {**leader_selector(deployment), GROUP_LABEL: str(ordinal)}


def worker_selector(deployment: InferenceDeployment, ordinal: int) -> dict[str, str]:
    """Return the selector of the worker pods of one group. The client Service and `status.selector` exclude them."""
    return {DEPLOYMENT_LABEL: deployment.name, ROLE_LABEL: WORKER, GROUP_LABEL: str(ordinal)}


def children_selector(name: str) -> str:
    """Return the label selector of all children of one deployment, as text."""
    return f"app.kubernetes.io/managed-by={MANAGED_BY},{DEPLOYMENT_LABEL}={name}"


def selector_text(labels: dict[str, str]) -> str:
    """Format labels as a label selector."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def group_name(deployment: InferenceDeployment, ordinal: int) -> str:
    """Return the name of a group's StatefulSet and rendezvous Service; its pod is NAME-gN-0."""
    return f"{deployment.name}-g{ordinal}"


def worker_set_name(deployment: InferenceDeployment, ordinal: int) -> str:
    """Return the name of the StatefulSet of a group's workers; its pods are NAME-gN-w-0 and up."""
    return f"{group_name(deployment, ordinal)}-w"


def service_name(deployment: InferenceDeployment) -> str:
    """Return the name of the client Service."""
    return deployment.name


def router_name(deployment: InferenceDeployment) -> str:
    """Return the name of the router's Deployment, ServiceAccount, RoleBinding and other children."""
    return router_name_of(deployment.name)


def router_name_of(name: str) -> str:
    """Return the name of the router's children of a resource's name."""
    return f"{name}-router"


def engines_service_name(deployment: InferenceDeployment) -> str:
    """Return the name of the headless Service whose EndpointSlices list the leaders, for the router."""
    return f"{deployment.name}-engines"


def account_name(deployment: InferenceDeployment) -> str:
    """Return the name of the pods' ServiceAccount."""
    return f"{deployment.name}-engine"


def facts_name(deployment: InferenceDeployment) -> str:
    """Return the name of the Job that reads the model, and of the ConfigMap with its facts."""
    return f"{deployment.name}-facts"


def rollout_config_map_name(deployment: InferenceDeployment) -> str:
    """Return the name of the ConfigMap with the last known-good revision and the rollout attempt."""
    return f"{deployment.name}-rollout"


def tuning_config_map_name(deployment: InferenceDeployment) -> str:
    """Return the name of the ConfigMap with the tuner's state."""
    return tuning_name_of(deployment.name)


def tuning_name_of(name: str) -> str:
    """Return the name of the tuning ConfigMap of a resource's name."""
    return f"{name}-tuning"
