"""Commands on the pods of a deployment: logs, chat and drain."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from trimtab_operator.builders.labels import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    GROUP_LABEL,
    HTTP_PORT,
    LEADER,
    ROLE_LABEL,
    ROUTER_COMPONENT,
)
from trimtab_operator.builders.pod import CONTAINER
from trimtab_operator.cli.cluster import ApiError, Cluster, Context, Namespace
from trimtab_operator.cli.names import complete_name
from trimtab_operator.cli.shared import exit_with_error
from trimtab_operator.kube.rbac import server_message

FOLLOW_SECONDS = 24 * 3600.0
ANSWER_SECONDS = 600.0
EVENT_PREFIX = "data: "
TOO_MANY_REQUESTS = 429
Json = dict[str, Any]
Name = Annotated[str, typer.Argument(help="Name of the InferenceDeployment.", autocompletion=complete_name)]


def logs(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    replica: Annotated[int | None, typer.Option(min=0, help="Number of the replica. Default: all.")] = None,
    router: Annotated[bool, typer.Option("--router", help="Show the router's pods instead.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Show the container's run before its last restart.")
    ] = False,
    tail: Annotated[int, typer.Option(min=0, help="Number of the last lines of each pod.")] = 100,
) -> None:
    """Print the logs of a deployment's engines, each line with the pod's name if there are several."""
    cluster = Cluster.connect("logs", namespace, context)
    cluster.resource(name)
    pods = pods_of(cluster, name, replica=replica, router=router)
    if not pods:
        which = "router" if router else "engine"
        exit_with_error(f"logs: {name} has no {which} pod; see `trimtab status {name}` for the reason")
    query: dict[str, Any] = {"tailLines": tail, "follow": str(follow).lower(), "previous": str(previous).lower()}
    query |= {} if router else {"container": CONTAINER}
    threads = [
        threading.Thread(target=_print_log, args=(cluster, pod["metadata"]["name"], query, len(pods) > 1), daemon=True)
        for pod in pods
    ]
    for thread in threads:
        thread.start()
        if not follow:
            thread.join()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        return


def pods_of(cluster: Cluster, name: str, *, replica: int | None = None, router: bool = False) -> list[Json]:
    """Return the pods of a deployment's engines, or of its router, by name."""
    selector = f"{DEPLOYMENT_LABEL}={name},{COMPONENT_LABEL}" + (f"={ROUTER_COMPONENT}" if router else "=engine")
    selector += "" if replica is None else f",{GROUP_LABEL}={replica}"
    found = cluster.get(f"/api/v1/namespaces/{cluster.namespace}/pods", labelSelector=selector).get("items") or []
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def _print_log(cluster: Cluster, pod: str, query: Json, has_prefix: bool) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/log"
    try:
        response = cluster.open("GET", path, query=query, seconds=FOLLOW_SECONDS)
    except ApiError as error:
        typer.echo(f"logs: {pod}: {_message(error)}", err=True)
        return
    prefix = f"{pod}: " if has_prefix else ""
    for line in _lines(response):
        typer.echo(f"{prefix}{line}")


def _lines(response: Any) -> Iterator[str]:
    """Yield the lines of a response as they arrive."""
    rest = b""
    for chunk in response.response.stream(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _message(error: ApiError) -> str:
    return server_message(error) or f"{error.status} {error.reason}"


def chat(
    name: Name,
    prompt: Annotated[str | None, typer.Argument(help="One prompt. Default: read prompts until Ctrl-D.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    system: Annotated[str | None, typer.Option(help="System prompt. Default: none.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer. Default: none.")] = None,
) -> None:
    """Chat with a deployment's model through the API server, without a port-forward.

    Use it to try a model: the API server relays every byte. A deployment that requires an API key cannot be reached,
    because the API server does not pass the key on.
    """
    cluster = Cluster.connect("chat", namespace, context)
    status = cluster.resource(name).get("status") or {}
    if not status.get("readyReplicas"):
        exit_with_error(
            f"chat: {name} has no ready replica ({status.get('phase', 'Pending')}); see `trimtab status {name}`"
        )
    messages: list[Json] = [] if system is None else [{"role": "system", "content": system}]
    body: Json = {"model": status.get("model", name), "stream": True, "messages": messages}
    body |= {} if max_tokens is None else {"max_tokens": max_tokens}
    for question in [prompt] if prompt is not None else _questions():
        messages.append({"role": "user", "content": question})
        answer = ""
        for part in _answer(cluster, name, body):
            answer += part
            typer.echo(part, nl=False)
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


def _questions() -> Iterator[str]:
    """Yield the lines that the user types, until the end of the input."""
    while True:
        try:
            question = input(">>> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if question:
            yield question


def _answer(cluster: Cluster, name: str, body: Json) -> Iterator[str]:
    """Send the messages, and yield the parts of the answer."""
    path = f"/api/v1/namespaces/{cluster.namespace}/services/{name}:{HTTP_PORT}/proxy/v1/chat/completions"
    try:
        response = cluster.open("POST", path, body=body, seconds=ANSWER_SECONDS)
    except ApiError as error:
        exit_with_error(f"chat: {name}: {_engine_message(error)}")
    for line in _lines(response):
        if line.startswith(EVENT_PREFIX) and line != f"{EVENT_PREFIX}[DONE]":
            event = json.loads(line.removeprefix(EVENT_PREFIX))
            if "error" in event:
                exit_with_error(f"chat: {name}: {event['error'].get('message', 'the request failed')}")
            for choice in event.get("choices") or ():
                yield choice.get("delta", {}).get("content") or ""


def _engine_message(error: ApiError) -> str:
    """Return the message of an OpenAI-style error, or of the API server's."""
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _message(error)


def drain(
    name: Name,
    replica: Annotated[int, typer.Option(min=0, help="Number of the replica, as in `trimtab status`.")],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Replace one replica: it finishes its requests, and the operator starts a new one.

    The pod is evicted, so PodDisruptionBudgets apply. Use it to move a replica off a node, or to restart it.
    """
    cluster = Cluster.connect("drain", namespace, context)
    cluster.resource(name)
    pods = pods_of(cluster, name, replica=replica)
    leaders = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE_LABEL) == LEADER]
    if not leaders:
        exit_with_error(f"drain: {name} has no replica {replica}{_numbers(pods_of(cluster, name))}")
    for pod in leaders:
        _evict(cluster, pod)


def _numbers(pods: Sequence[Json]) -> str:
    numbers = sorted({pod["metadata"]["labels"].get(GROUP_LABEL, "") for pod in pods} - {""})
    return f"; choose one of {', '.join(numbers)}" if numbers else "; no replica exists"


def _evict(cluster: Cluster, pod: Json) -> None:
    metadata = pod["metadata"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "deleteOptions": {"preconditions": {"uid": metadata["uid"]}},
    }
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{metadata['name']}/eviction"
    try:
        cluster.open("POST", path, body=eviction)
    except ApiError as error:
        if error.status == TOO_MANY_REQUESTS:
            exit_with_error(
                f"drain: {metadata['name']}: the PodDisruptionBudget allows no eviction now; wait until all replicas "
                "are ready, or add one"
            )
        exit_with_error(f"drain: {metadata['name']}: {_message(error)}")
    typer.echo(f"{metadata['name']} is draining: it finishes its requests, then the operator replaces it")
