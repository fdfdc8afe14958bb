"""Names of remote models."""

from pathlib import Path

import pytest
from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.sources.name import RemoteModel, Scheme, remote_model

COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("written", "model"),
    [
        ("hf://Qwen/Qwen3-8B", RemoteModel(Scheme.HUB, "Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B", RemoteModel(Scheme.HUB, "Qwen/Qwen3-8B")),
        ("hf://Qwen/Qwen3-8B@v1.0", RemoteModel(Scheme.HUB, "Qwen/Qwen3-8B", "v1.0")),
        ("hf://Qwen/Qwen3-8B@refs/pr/4", RemoteModel(Scheme.HUB, "Qwen/Qwen3-8B", "refs/pr/4")),
        (f"hf://o/n@{COMMIT}/n-Q4_K_M.gguf", RemoteModel(Scheme.HUB, "o/n", COMMIT, "n-Q4_K_M.gguf")),
        ("hf://o/n/n.gguf", RemoteModel(Scheme.HUB, "o/n", None, "n.gguf")),
    ],
)
def test_a_model_of_the_hub_has_a_repository_a_revision_and_perhaps_a_file(written: str, model: RemoteModel) -> None:
    assert remote_model(written) == model
    assert remote_model(str(model)) == model


PIN, DIGEST = "b" * 64, "sha256:" + "c" * 64


@pytest.mark.parametrize(
    ("written", "model", "name"),
    [
        ("s3://bucket/llms/tiny", RemoteModel(Scheme.S3, "bucket/llms/tiny"), "tiny"),
        ("s3://my.bucket", RemoteModel(Scheme.S3, "my.bucket"), "my.bucket"),
        ("s3://bucket/a b@c", RemoteModel(Scheme.S3, "bucket/a b@c"), "a b@c"),
        (f"s3://bucket/tiny@{PIN}", RemoteModel(Scheme.S3, "bucket/tiny", PIN), "tiny"),
        ("s3://bucket/m/q4.gguf", RemoteModel(Scheme.S3, "bucket/m", None, "q4.gguf"), "q4"),
        (f"s3://bucket/m/q4.gguf@{PIN}", RemoteModel(Scheme.S3, "bucket/m", PIN, "q4.gguf"), "q4"),
        ("oci://localhost/tiny", RemoteModel(Scheme.OCI, "localhost/tiny"), "tiny"),
        ("oci://registry:5000/llms/tiny:v1.0", RemoteModel(Scheme.OCI, "registry:5000/llms/tiny", "v1.0"), "tiny"),
        (f"oci://ghcr.io/o/tiny@{DIGEST}", RemoteModel(Scheme.OCI, "ghcr.io/o/tiny", DIGEST), "tiny"),
    ],
)
def test_a_bucket_has_a_prefix_and_a_registry_a_repository(written: str, model: RemoteModel, name: str) -> None:
    assert remote_model(written) == model
    assert remote_model(str(model)) == model
    assert model.name == name


def test_a_tag_beside_a_digest_says_nothing_more() -> None:
    assert remote_model(f"oci://ghcr.io/o/n:v1@{DIGEST}") == RemoteModel(Scheme.OCI, "ghcr.io/o/n", DIGEST)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("s3://", "write s3://BUCKET/PREFIX"),
        ("s3:///llms", "write s3://BUCKET/PREFIX"),
        ("s3://bucket//llms", "write s3://BUCKET/PREFIX"),
        ("oci://tiny", "write oci://REGISTRY/REPOSITORY:TAG"),
        ("oci://llms/tiny", "write oci://REGISTRY/REPOSITORY:TAG"),
        ("oci://ghcr.io/Upper", "write oci://REGISTRY/REPOSITORY:TAG"),
        ("oci://ghcr.io/o/n:", "write oci://REGISTRY/REPOSITORY:TAG"),
        ("oci://ghcr.io/o/n@md5:1", "write oci://REGISTRY/REPOSITORY:TAG"),
    ],
)
def test_name_without_bucket_or_repository_is_rejected(written: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        remote_model(written)


def test_only_what_can_mean_nothing_else_is_a_pin() -> None:
    assert RemoteModel(Scheme.S3, "b/p", PIN).is_pinned
    assert RemoteModel(Scheme.OCI, "r.io/n", DIGEST).is_pinned
    assert not RemoteModel(Scheme.OCI, "r.io/n", "v1").is_pinned
    with pytest.raises(ConfigError, match="a bucket has no branches"):
        remote_model("s3://bucket/tiny", "main")


def test_models_of_one_name_lie_apart_in_the_cache() -> None:
    places = ("a/tiny", "b/tiny", "a/x/tiny")
    folders = {RemoteModel(scheme, place).cache_folder_name for scheme in Scheme for place in places}
    assert len(folders) == 9
    assert all("/" not in folder for folder in folders)


@pytest.mark.parametrize("path", ["/models/llm", "model.gguf", "./a/b", "file:///a/b", "a/b/c"])
def test_a_path_is_no_model_of_the_hub(path: str) -> None:
    assert remote_model(path) is None


def test_a_folder_that_is_here_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert remote_model("org/name") is None
    assert remote_model("hf://org/name") == RemoteModel(Scheme.HUB, "org/name")


@pytest.mark.parametrize("written", ["hf://", "hf://name", "hf://a/b/c", "hf://a/b@", "hf://a/../b", "hf://-a/b"])
def test_name_without_model_is_rejected(written: str) -> None:
    with pytest.raises(ModelError, match="write hf://ORG/NAME"):
        remote_model(written)


def test_a_revision_is_given_once_and_to_models_of_the_hub() -> None:
    assert remote_model("hf://a/b", "dev") == RemoteModel(Scheme.HUB, "a/b", "dev")
    assert remote_model("hf://a/b@dev", "dev") == RemoteModel(Scheme.HUB, "a/b", "dev")
    with pytest.raises(ConfigError, match="two revisions"):
        remote_model("hf://a/b@dev", "main")
    with pytest.raises(ConfigError, match="is a path"):
        remote_model("/models/b", "main")


def test_only_a_commit_is_pinned() -> None:
    assert RemoteModel(Scheme.HUB, "a/b", COMMIT).is_pinned
    assert not RemoteModel(Scheme.HUB, "a/b", "main").is_pinned
    assert not RemoteModel(Scheme.HUB, "a/b").is_pinned


@pytest.mark.parametrize(("written", "name"), [("hf://Qwen/Qwen3-8B@main", "Qwen3-8B"), ("hf://a/b/b-Q4.gguf", "b-Q4")])
def test_clients_call_it_by_its_last_part(written: str, name: str) -> None:
    model = remote_model(written)
    assert model is not None
    assert model.name == name
