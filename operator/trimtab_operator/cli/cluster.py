"""Access to a cluster with the user's permissions, for the commands of `trimtab` that need one.

Errors end the command with one line: what failed, and what to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from trimtab_operator.cli.shared import exit_with_error
from trimtab_operator.kube.rbac import missing_permission, server_message
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION

REQUEST_SECONDS = 15.0
MAX_ERROR_LENGTH = 300  # characters of an error from another component
NOT_FOUND, CONFLICT, INVALID, BAD_REQUEST = 404, 409, 422, 400

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the InferenceDeployment. Default: the context's.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: the current context.")]
Answer = TypeVar("Answer")


class ApiError(Exception):
    """An error response of the API server, or of a pod or Service behind its proxy."""

    def __init__(self, status: int, reason: str, body: bytes) -> None:
        self.status, self.reason, self.body = status, reason, body
        super().__init__(f"{status} {reason}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connection to the API server. `command` is named in errors."""

    command: str
    namespace: str
    client: Any
    host: str

    @classmethod
    def connect(cls, command: str, namespace: str | None, context: str | None) -> Cluster:
        """Return a connection by the kubeconfig."""
        import kubernetes.client  # imported here, because other commands need no Kubernetes client
        import kubernetes.config
        import yaml

        config: Any = kubernetes.config  # its functions have no types
        configuration = kubernetes.client.Configuration()
        configuration.retries = 0
        path = os.environ.get("KUBECONFIG")
        try:
            _, current = config.list_kube_config_contexts(config_file=path)
            config.load_kube_config(config_file=path, context=context, client_configuration=configuration)
        except (
            kubernetes.config.ConfigException,
            OSError,
            yaml.YAMLError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            message = " ".join(str(error).split())[:MAX_ERROR_LENGTH].rstrip(".")
            exit_with_error(f"{command}: no cluster configured ({message}); set KUBECONFIG or --context")
        chosen = namespace or (current["context"].get("namespace") if context is None else None) or "default"
        return cls(command, chosen, kubernetes.client.ApiClient(configuration), configuration.host)

    def resource(self, name: str) -> dict[str, Any]:
        """Return an InferenceDeployment."""
        found: Any = self._call(
            lambda: self._objects().get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=REQUEST_SECONDS
            ),
            name,
        )
        return self._checked(found, "metadata")

    def resources(self, *, all_namespaces: bool) -> list[dict[str, Any]]:
        """Return all InferenceDeployments of the namespace, or of the cluster."""
        api, kwargs = self._objects(), {"_request_timeout": REQUEST_SECONDS}
        if all_namespaces:
            found = self._call(lambda: api.list_cluster_custom_object(GROUP, VERSION, PLURAL, **kwargs))
        else:
            found = self._call(
                lambda: api.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, **kwargs)
            )
        items: list[dict[str, Any]] = self._checked(found, "items")["items"]
        return items

    def patch(self, name: str, body: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Apply a merge patch to an InferenceDeployment, and return the result."""
        found: Any = self._call(
            lambda: self._objects().patch_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                name,
                body,
                field_manager="trimtab",
                _content_type="application/merge-patch+json",
                _request_timeout=REQUEST_SECONDS,
                **({"dry_run": "All"} if dry_run else {}),
            ),
            name,
        )
        return self._checked(found, "metadata")

    def config_map(self, name: str) -> Mapping[str, str] | None:
        """Return the data of a ConfigMap, or None if it does not exist."""
        import kubernetes.client

        core: Any = kubernetes.client.CoreV1Api(self.client)
        try:
            found = core.read_namespaced_config_map(name, self.namespace, _request_timeout=REQUEST_SECONDS)
        except kubernetes.client.ApiException as error:
            if error.status == NOT_FOUND:
                return None
            self._exit_with_api_error(error, name)
        data: Mapping[str, str] = found.data or {}
        return data

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Return the object at a path of the API."""
        return self._checked(json.loads(self.request("GET", path, query=query).read()), "metadata")

    def find(self, path: str, **query: str | int) -> dict[str, Any] | None:
        """Return the object at a path of the API, or None if it does not exist or cannot be read."""
        try:
            found = json.loads(self.open("GET", path, query=query).read())
        except (ApiError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def text(self, path: str, **query: str | int) -> bytes | None:
        """Return the body at a path of the API, such as a proxied page. None if it cannot be read."""
        try:
            body: bytes = self.open("GET", path, query=query).read()
        except ApiError:
            return None
        return body

    def request(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None, seconds: float = 0
    ) -> Any:
        """Send a request, and return the response. An error response ends the command."""
        try:
            return self.open(method, path, query=query, body=body, seconds=seconds)
        except ApiError as error:
            self._exit_with_api_error(error, None)

    def open(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None, seconds: float = 0
    ) -> Any:
        """Send a request, and return the response, whose body may be read as a stream.

        Raises:
            ApiError: The API server, or the pod or Service behind its proxy, responded with an error.
        """
        import urllib3.exceptions

        parameters = self.client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "*/*", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        timeout = (REQUEST_SECONDS, seconds or REQUEST_SECONDS)
        try:
            response = self.client.call_api(*parameters, _request_timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            exit_with_error(f"{self.command}: cannot reach the API server at {self.host}: {_reason(error)}")
        if response.status >= BAD_REQUEST:
            raise ApiError(response.status, response.reason or "", response.read())
        return response

    def forward_port(self, namespace: str, pod: str, port: int) -> Any:
        """Return a socket that is connected to a port of a pod, through the API server.

        Raises:
            ApiError: The API server rejected it.
        """
        import kubernetes.client
        import kubernetes.stream

        client = kubernetes.client.ApiClient(self.client.configuration)  # forwarding changes the client it uses
        connect = kubernetes.client.CoreV1Api(client).connect_get_namespaced_pod_portforward
        try:
            forward: Any = kubernetes.stream.portforward(connect, pod, namespace, ports=str(port))
        except kubernetes.client.ApiException as error:
            raise ApiError(error.status or 0, str(error.reason or ""), b"") from error
        return forward.socket(port)

    def _objects(self) -> Any:
        import kubernetes.client

        return kubernetes.client.CustomObjectsApi(self.client)

    def _checked(self, found: Any, key: str) -> dict[str, Any]:
        if not isinstance(found, dict) or key not in found:
            exit_with_error(f"{self.command}: no Kubernetes API server at {self.host}; check KUBECONFIG and --context")
        return found

    def _call(self, call: Callable[[], Answer], name: str | None = None) -> Answer:
        import kubernetes.client
        import urllib3.exceptions

        try:
            return call()
        except kubernetes.client.ApiException as error:
            self._exit_with_api_error(error, name)
        except urllib3.exceptions.HTTPError as error:
            exit_with_error(f"{self.command}: cannot reach the API server at {self.host}: {_reason(error)}")

    def _exit_with_api_error(self, error: Any, name: str | None) -> NoReturn:
        if error.status == NOT_FOUND and name is not None:
            exit_with_error(
                f"{self.command}: {KIND} {name} not found in namespace {self.namespace}; list them with "
                f"kubectl get {PLURAL} -A"
            )
        permission = missing_permission(error)
        if permission is not None:
            exit_with_error(
                f"{self.command}: permission denied to {permission}; ask the cluster administrator to grant it"
            )
        message = server_message(error) or error.reason
        if error.status in (BAD_REQUEST, CONFLICT, INVALID):
            exit_with_error(f"{self.command}: rejected: {message}")
        exit_with_error(f"{self.command}: API server error {error.status}: {message}")


def has_kubeconfig(context: str | None) -> bool:
    """Return True if a kubeconfig with this context, or with a current one, exists."""
    import kubernetes.config
    import yaml

    config: Any = kubernetes.config  # its functions have no types
    try:
        contexts, _ = config.list_kube_config_contexts(config_file=os.environ.get("KUBECONFIG"))
    except (kubernetes.config.ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, AttributeError):
        return False
    return context is None or any(entry["name"] == context for entry in contexts)


def _reason(error: Exception) -> str:
    """Return the message of the cause of urllib3's `MaxRetryError`."""
    cause = getattr(error, "reason", None) or error
    return " ".join(str(cause).rpartition(": ")[2].split())[:MAX_ERROR_LENGTH] or type(cause).__name__
