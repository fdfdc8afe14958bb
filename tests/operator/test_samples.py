"""The samples in config/samples: each is valid without warnings and renders."""

from pathlib import Path

import pytest
import yaml
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.planning.admission import validation_messages, warnings_of
from trimtab_operator.resource.spec import InferenceDeployment
from typer.testing import CliRunner

REPOSITORY = Path(__file__).parents[2]
SAMPLES = sorted((REPOSITORY / "config" / "samples").glob("*.yaml"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_sample_is_valid_and_renders(path: Path) -> None:
    body = yaml.safe_load(path.read_text())
    assert validation_messages(body, default_image="engine:1") == []
    assert warnings_of(InferenceDeployment.parse(body, default_image="engine:1")) == []
    done = CliRunner().invoke(app, ["render", "-f", str(path), "--default-image", "engine:1"])
    assert done.exit_code == 0, done.output
    assert (
        "StatefulSet" in {item["kind"] for item in yaml.safe_load_all(done.stdout)}
        or "minReplicas: 0" in path.read_text()
    )


def test_names_of_samples_differ() -> None:
    names = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in SAMPLES]
    assert len(set(names)) == len(names)


def test_reference_lists_every_sample() -> None:
    page = (REPOSITORY / "docs" / "reference" / "resource.md").read_text()
    assert [path.name for path in SAMPLES if path.name not in page] == []
