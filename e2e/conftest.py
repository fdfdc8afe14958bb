"""Fixtures of the user stories: one cluster, one installed chart, a namespace per story.

The stories need a cluster that is up (`python3 e2e/cluster up`, or CLUSTER=current) and drive it as a user would.
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
from harness.lanes import Lanes, LaneScheduling, in_order, is_alone, lane
from harness.report import add_facts, facts, log_line, set_sink
from harness.target import NoCluster, Target, connect, images_in_cluster
from harness.tuning import CALM_SECONDS, SOAK_CALM_SECONDS
from harness.wait import Waiter

SCENARIO_SECONDS = 3600.0  # far above any deadline of a story, soaking or not: pytest-timeout is the last resort
FACTS = "facts"  # what a lane has measured, on its way to the process that prints the summary
LANES = pytest.StashKey[Lanes]()
TURN = pytest.StashKey[ExitStack]()

Apply = Callable[..., Deployment]
Remove = Callable[[Deployment], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="stay under load far longer where that shows something")


@pytest.fixture(scope="session")
def calm_seconds(request: pytest.FixtureRequest) -> float:
    """How long the load must go on without a preemption after the operator has acted."""
    return SOAK_CALM_SECONDS if request.config.getoption("--soak") else CALM_SECONDS


# --- lanes: three stories at once where none disturbs the others (harness/lanes.py) ----------------------------------


@pytest.hookimpl(trylast=True)  # the reporter is registered by then
def pytest_configure(config: pytest.Config) -> None:
    """Progress lines go past pytest's capture, so they are seen while a story runs."""
    given = getattr(config, "workerinput", {}).get("lanes")
    config.stash[LANES] = Lanes(Path(given or tempfile.mkdtemp(prefix="trimtab-e2e-")))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    number = lane()
    if reporter is None or capture is None:
        return

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            if number is not None:  # its reporter speaks to nobody: the terminal belongs to who started the lane
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
    """Take a turn: one for all stories that run beside others, and then one for those that have the cluster."""
    stash = item.config.stash
    if TURN not in stash:
        stash[TURN] = ExitStack()
        stash[TURN].enter_context(stash[LANES].turn(is_alone=is_alone(item)))
    if lane() is not None:
        log_line(f"{item.path.name}: {item.name}")
    try:
        return (yield)
    finally:
        if nextitem is None or is_alone(item) != is_alone(nextitem):
            stash[TURN].close()
            del stash[TURN]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if lane() is not None:
        session.config.workeroutput[FACTS] = facts()  # type: ignore[attr-defined]  # pytest-xdist puts it there


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A lane has ended: what it measured is told with the rest."""
    add_facts(getattr(node, "workeroutput", {}).get(FACTS, []))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_SECONDS))
    items[:] = in_order(items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for fact in facts():
        terminalreporter.write_line(f"measured: {fact}")


# --- what stories stand on --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def lanes(pytestconfig: pytest.Config) -> Lanes:
    return pytestconfig.stash[LANES]


@pytest.fixture(scope="session")
def target() -> Target:
    with _a_cluster():
        found = connect()
    log_line(f"running on {found.describe()}")
    return found


@contextmanager
def _a_cluster() -> Iterator[None]:
    """End the run, with what to do, where there is no cluster to run on."""
    try:
        yield
    except NoCluster as error:
        pytest.exit(f"{error}\nbring one up with `python3 e2e/cluster up`, or set CLUSTER=current", returncode=2)


@pytest.fixture(scope="session")
def kube(target: Target) -> Kube:
    return target.kube


@pytest.fixture(scope="session")
def chart(target: Target, lanes: Lanes) -> Iterator[Installation]:
    """The chart, installed once for all stories and removed at the end; its values are what the last file chose."""
    with lanes.one_at_a_time("images"):
        installed = Installation(target.kube, images_in_cluster())

    def install() -> None:
        with _a_cluster():
            require_no_other_release(target)
        installed.install()

    def remove() -> None:
        for name in lanes.namespaces():
            _await_end(installed.kube, name)
        installed.uninstall()

    with lanes.installed(install, remove):
        yield installed


def _await_end(kube: Kube, name: str) -> None:
    """A story's namespace went while the next one ran; at the end of all, nothing may be left."""
    try:
        kube.delete("namespace", name, wait=True)
    except KubectlError as error:
        pytest.fail(f"namespace {name} could not be deleted: {error}\n{Waiter(kube, name).diagnostics()}")


@pytest.fixture(scope="module")
def installation(chart: Installation) -> Installation:
    """The chart with its own values. A file of stories about other values has an `installation` of its own."""
    chart.ensure()
    return chart


@pytest.fixture(scope="module")
def bare_cluster(chart: Installation, kube: Kube) -> Iterator[Installation]:
    """A cluster without Trimtab, for stories that install it as a page says. They come last."""
    chart.uninstall()
    yield chart
    if kube.get("crd", CRD_KIND) is not None:
        kube.delete(CRD_KIND, "--all", "default")
    chart.uninstall()


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, chart: Installation, lanes: Lanes) -> Iterator[str]:
    """`trimtab-e2e-STORY`, empty, deleted after the story."""
    kube = chart.kube
    story = re.sub(r"^.*test_", "", request.module.__name__).replace("_", "-")
    name = f"trimtab-e2e-{story}"
    kube.delete("namespace", name, wait=True)
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    lanes.use_namespace(name)
    yield name
    kube.delete("namespace", name)


@pytest.fixture(scope="module")
def apply(installation: Installation, namespace: str) -> Apply:
    """Apply the sample with changes to its spec, under a name, in the story's namespace."""

    def apply_sample(name: str | None = None, **changes: Any) -> Deployment:
        manifest = sample(name, image=installation.images.model, **changes)
        installation.kube.apply(manifest, namespace=namespace)
        return Deployment(installation.kube, namespace, manifest["metadata"]["name"])

    return apply_sample


@pytest.fixture(scope="module")
def remove(kube: Kube, namespace: str) -> Iterator[Remove]:
    """Delete a resource, and go on: that nothing of it stays is looked at after the file's last story."""
    removed: list[Deployment] = []

    def delete(deployment: Deployment) -> None:
        kube.delete(CRD_KIND, deployment.name, namespace)
        removed.append(deployment)

    yield delete
    for deployment in removed:
        deployment.await_deletion_started()


@pytest.fixture(scope="module")
def ready(apply: Apply) -> Deployment:
    """The sample, applied and Ready: the state that most stories start from."""
    deployment = apply()
    deployment.ready()
    return deployment
