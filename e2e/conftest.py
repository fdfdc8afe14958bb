"""Fixtures of the e2e scenarios: one cluster, one installed chart, a namespace per file.

The scenarios need a running cluster (`python3 e2e/cluster up`, or CLUSTER=current) and use it as a user would.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.deployment import Deployment, sample
from harness.install import Installation, require_no_other_release
from harness.kube import CRD_KIND, Kube, KubectlError
from harness.lanes import Lanes, LaneScheduling, in_order, lane, needs_exclusive_cluster
from harness.report import add_facts, facts, log_line, set_sink
from harness.target import NoCluster, Target, connect, images_in_cluster
from harness.tuning import CALM_SECONDS, SOAK_CALM_SECONDS
from harness.wait import Waiter

SCENARIO_SECONDS = 3600.0  # far above all deadlines; a last resort
FACTS = "facts"  # values measured by a lane, sent to the process that prints the summary
LANES = pytest.StashKey[Lanes]()
CLUSTER_USE = pytest.StashKey[ExitStack]()

Apply = Callable[..., Deployment]
Remove = Callable[[Deployment], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run load phases much longer")


@pytest.fixture(scope="session")
def calm_seconds(request: pytest.FixtureRequest) -> float:
    """Return how long the load must run without a preemption after the operator has acted."""
    return SOAK_CALM_SECONDS if request.config.getoption("--soak") else CALM_SECONDS


@pytest.fixture
def soak_only(request: pytest.FixtureRequest) -> None:
    """Skip a scenario without --soak: it takes several minutes."""
    if not request.config.getoption("--soak"):
        pytest.skip("takes several minutes; `make soak` runs it")


# --- lanes: parallel scenarios (harness/lanes.py) ---------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # after the reporter is registered
def pytest_configure(config: pytest.Config) -> None:
    """Print progress lines past pytest's capture, so that they are visible while a scenario runs."""
    given = getattr(config, "workerinput", {}).get("lanes")
    config.stash[LANES] = Lanes(Path(given or tempfile.mkdtemp(prefix="trimtab-e2e-")))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    number = lane()
    if reporter is None or capture is None:
        return

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            if number is not None:  # the terminal belongs to the process that started the lane
                print(f"{number}| {line}", file=sys.stderr, flush=True)
            else:
                reporter.ensure_newline()
                reporter.write_line(line)

    set_sink(show)


def pytest_unconfigure(config: pytest.Config) -> None:
    if lane() is None:
        shutil.rmtree(config.stash[LANES].folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["lanes"] = str(node.config.stash[LANES].folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling:
    return LaneScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Reserve the cluster: shared for parallel scenarios, then exclusively for the others."""
    stash = item.config.stash
    if CLUSTER_USE not in stash:
        stash[CLUSTER_USE] = ExitStack()
        stash[CLUSTER_USE].enter_context(stash[LANES].use_cluster(exclusive=needs_exclusive_cluster(item)))
    if lane() is not None:
        log_line(f"{item.path.name}: {item.name}")
    try:
        return (yield)
    finally:
        if nextitem is None or needs_exclusive_cluster(item) != needs_exclusive_cluster(nextitem):
            stash[CLUSTER_USE].close()
            del stash[CLUSTER_USE]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if lane() is not None:
        session.config.workeroutput[FACTS] = facts()  # type: ignore[attr-defined]  # pytest-xdist puts it there


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the values that a finished lane has measured."""
    add_facts(getattr(node, "workeroutput", {}).get(FACTS, []))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_SECONDS))
    items[:] = in_order(items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for fact in facts():
        terminalreporter.write_line(f"measured: {fact}")


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def lanes(pytestconfig: pytest.Config) -> Lanes:
    return pytestconfig.stash[LANES]


@pytest.fixture(scope="session")
def target() -> Target:
    with _cluster_required():
        found = connect()
    log_line(f"running on {found.describe()}")
    return found


@contextmanager
def _cluster_required() -> Iterator[None]:
    """End the run with the remedy if there is no cluster to run on."""
    try:
        yield
    except NoCluster as error:
        pytest.exit(f"{error}\ncreate one with `python3 e2e/cluster up`, or set CLUSTER=current", returncode=2)


@pytest.fixture(scope="session")
def kube(target: Target) -> Kube:
    return target.kube


@pytest.fixture(scope="session")
def chart(target: Target, lanes: Lanes) -> Iterator[Installation]:
    """Return the chart, installed once for all scenarios and removed at the end, with the values of the last file."""
    with lanes.locked("images"):
        installed = Installation(target.kube, images_in_cluster())

    def install() -> None:
        with _cluster_required():
            require_no_other_release(target)
        installed.install()

    def remove() -> None:
        for name in lanes.namespaces():
            _await_namespace_deletion(installed.kube, name)
        installed.uninstall()

    with lanes.installed(install, remove):
        yield installed


def _await_namespace_deletion(kube: Kube, name: str) -> None:
    """Wait until a namespace is deleted, which was started while other scenarios ran."""
    try:
        kube.delete("namespace", name, wait=True)
    except KubectlError as error:
        pytest.fail(f"namespace {name} could not be deleted: {error}\n{Waiter(kube, name).diagnostics()}")


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """Return the chart with default values. Files that need other values override this fixture."""
    chart.ensure()
    return chart


@pytest.fixture(scope="module")
def bare_cluster(chart: Installation, kube: Kube) -> Iterator[Installation]:
    """Return a cluster without Trimtab, for the scenarios that install it with a page's commands. They run last."""
    chart.uninstall()
    yield chart
    if kube.get("crd", CRD_KIND) is not None:
        kube.delete(CRD_KIND, "--all", "default")
    chart.uninstall()


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, chart: Installation, lanes: Lanes) -> Iterator[str]:
    """Return the empty namespace `trimtab-e2e-FILE`, deleted after the file's scenarios."""
    kube = chart.kube
    scenario = re.sub(r"^.*test_", "", request.module.__name__).replace("_", "-")
    name = f"trimtab-e2e-{scenario}"
    kube.delete("namespace", name, wait=True)
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    lanes.use_namespace(name)
    yield name
    kube.delete("namespace", name)


@pytest.fixture(scope="module")
def apply(installation: Installation, namespace: str) -> Apply:
    """Return a function that applies the sample with changes to its spec, in the scenario's namespace."""

    def apply_sample(name: str | None = None, **changes: Any) -> Deployment:
        manifest = sample(name, image=installation.images.model, **changes)
        installation.kube.apply(manifest, namespace=namespace)
        return Deployment(installation.kube, namespace, manifest["metadata"]["name"])

    return apply_sample


@pytest.fixture(scope="module")
def remove(kube: Kube, namespace: str) -> Iterator[Remove]:
    """Return a function that deletes a resource; its deletion is verified after the file's last scenario."""
    removed: list[Deployment] = []

    def delete(deployment: Deployment) -> None:
        kube.delete(CRD_KIND, deployment.name, namespace)
        removed.append(deployment)

    yield delete
    for deployment in removed:
        deployment.await_deletion_started()


@pytest.fixture(scope="module")
def ready(apply: Apply) -> Deployment:
    """Return the sample, applied and Ready."""
    deployment = apply()
    deployment.ready()
    return deployment
