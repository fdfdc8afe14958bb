"""Fetching of models from an OCI registry into the cache, with faults."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hub_repository import SHARD_BYTES, a_repository
from registry_server import IMAGE, INDEX, TAR, TITLE, Faults, Layer, RegistryServer, digest_of, manifest_of, tar_of
from trimtab_engine.cli import main
from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.ipc.network import ReservedPorts
from trimtab_engine.sources import source, transfer
from trimtab_engine.sources.cache import ModelCache
from trimtab_engine.sources.fetch import Fetched, describe, fetch
from trimtab_engine.sources.files import RemoteFile
from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.sources.oci_manifest import in_its_folder, layers_of
from trimtab_engine.sources.oci_registry import Account, RegistrySource, account_of
from trimtab_engine.sources.source import FetchOptions, SourceUnavailable

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LOADED = {FIRST, SECOND, "model.safetensors.index.json", "config.json", "tokenizer.json"}
MODELPACK, KITOPS = "application/vnd.cncf.model", "application/vnd.kitops.modelkit"
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def running() -> Iterator[RegistryServer]:
    with RegistryServer().running() as server:
        yield server


@pytest.fixture
def registry(running: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> RegistryServer:
    """A registry without faults; no delay between attempts."""
    monkeypatch.setattr(source, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(transfer, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(transfer, "MAX_FRUITLESS", 2)
    monkeypatch.setattr("trimtab_engine.sources.oci_registry.PART_BYTES", 10_000)  # of a cut less than a part is lost
    running.faults = Faults()
    running.asked.clear()
    return running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model's files by name, and unneeded files among them."""
    folder = a_repository(tmp_path_factory.mktemp("there") / "tiny")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def options(tmp_path: Path) -> FetchOptions:
    return FetchOptions(folder=tmp_path / "cache")


def as_oras_pushes(files: dict[str, bytes]) -> list[Layer]:
    """Each file a layer with its name, of the type that ORAS gives to all."""
    return [Layer(data, TAR, {TITLE: name}) for name, data in files.items()]


def pushed(registry: RegistryServer, layers: Sequence[Layer]) -> RemoteModel:
    name = f"llms/tiny-{next(NUMBERS)}"
    registry.push(name, "v1", layers)
    return RemoteModel(Scheme.OCI, f"{registry.host}/{name}", "v1")


def fetched(model: RemoteModel, options: FetchOptions) -> Fetched:
    found = fetch(model, options)
    found.close()
    return found


def contents(found: Fetched) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in found.path.iterdir()}


# --- what is pushed ---------------------------------------------------------------------------------------------------


def under(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def as_modelpack(files: dict[str, bytes]) -> list[Layer]:
    """Weights as they are, texts in one archive."""
    texts = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    raw = f"{MODELPACK}.weight.v1.raw"
    weights = [Layer(files[name], raw, {"org.cncf.model.filepath": name}) for name in (FIRST, SECOND)]
    packed = {"org.cncf.model.filepath": "texts"}
    return [*weights, Layer(tar_of(texts), f"{MODELPACK}.weight.config.v1.tar", packed)]


def as_modelkit(files: dict[str, bytes]) -> list[Layer]:
    data = Layer(tar_of({"rows.safetensors": b"of no model"}), f"{KITOPS}.dataset.v1.tar")
    return [Layer(tar_of(files, compressed=True), f"{KITOPS}.model.v1.tar+gzip"), data]


def as_image(files: dict[str, bytes]) -> list[Layer]:
    """A base, the model in a folder of it, and a layer that replaces, deletes and links."""
    base = tar_of({"etc/os-release": b"x", "etc/app.json": b"{}"}, compressed=True)
    early = {**files, "config.json": b"of a lower layer", "added_tokens.json": b"{}"}
    last = {
        "models/tiny/config.json": files["config.json"],
        "models/tiny/.wh.added_tokens.json": b"",
        "models/tiny/tokenizer.json": files["tokenizer.json"],
    }
    return [
        Layer(base, "application/vnd.docker.image.rootfs.diff.tar.gzip"),
        Layer(tar_of(under("./models/tiny", early)), TAR),
        Layer(tar_of(last, links={"etc/same.json": "models/tiny/config.json"}), TAR),
    ]


@pytest.mark.parametrize("packed", [as_oras_pushes, as_modelpack, as_modelkit, as_image])
def test_weights_and_texts_come_however_they_were_packed(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, packed: Any
) -> None:
    found = fetched(pushed(registry, packed(files)), options)
    assert contents(found) == {name: data for name, data in files.items() if name in LOADED}
    assert options.folder is not None
    kept = sum(blob.stat().st_size for blob in options.folder.glob("*/blobs/*"))
    assert kept == sum(len(files[name]) for name in LOADED)  # neither layers nor their leftovers


@pytest.mark.parametrize("packed", [as_oras_pushes, as_modelpack, as_modelkit, as_image])
def test_metadata_is_fetched_without_weights(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, tmp_path: Path, packed: Any
) -> None:
    layers = packed(files)
    found = describe(pushed(registry, layers), options, tmp_path / "described")
    assert (found.weights_bytes, found.is_safetensors) == (2 * SHARD_BYTES, True)
    assert found.folder.joinpath("config.json").read_bytes() == files["config.json"]
    assert not [*tmp_path.glob("described/*/snapshots/*/*.safetensors")]
    if packed is as_image:  # only headers of a plain archive are read, and nearby bytes
        asked = [one.range[6:].split("-") for one in registry.asked_for(layers[1].data) if one.range]
        assert sum(int(end) - int(begin) + 1 for begin, end in asked) < len(layers[1].data)


def test_an_index_leads_to_the_image_for_this_machine(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    name = model.place.partition("/")[2]
    digest = registry.manifests[name, "v1"][1]
    entries = [
        {"mediaType": IMAGE, "digest": digest_of(b"attestation"), "size": 1, "platform": {"os": "unknown"}},
        {"mediaType": IMAGE, "digest": digest_of(digest), "size": len(digest), "platform": {"os": "linux"}},
    ]
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()
    pin = registry.push_manifest(name, "all", index, INDEX)
    found = fetched(replace(model, revision="all"), options)
    assert found.commit == pin
    assert set(contents(found)) == LOADED


def test_the_tag_is_pinned_to_the_digest_and_a_digest_that_is_here_asks_nobody(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    pinned = fetched(model, options).model
    assert pinned.revision == digest_of(manifest_of(as_oras_pushes(files)))
    assert pinned.is_pinned
    registry.asked.clear()
    assert fetched(pinned, options).model == pinned
    assert registry.asked == []


def test_archive_paths_stay_inside_the_cache(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    out = {"../../outside.json": b"x", "/etc/absolute.json": b"x"}
    found = fetched(pushed(registry, [Layer(tar_of({**out, **under("m", files)}))]), options)
    assert set(contents(found)) == LOADED
    assert options.folder is not None
    assert not [*options.folder.rglob("outside.json")]


# --- on the way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [as_oras_pushes, as_image])
def test_a_download_that_was_cut_goes_on_where_it_was(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, packed: Any
) -> None:
    layers = packed(files)
    large = next(layer for layer in layers if len(layer.data) >= SHARD_BYTES)
    registry.faults.cuts = {digest_of(large.data): [100_000, 50_000]}
    found = fetched(pushed(registry, layers), options)
    assert contents(found) == {name: data for name, data in files.items() if name in LOADED}
    assert [one.range for one in registry.asked_for(large.data)] == [None, "bytes=100000-", "bytes=150000-"]


def test_another_process_goes_on_where_the_first_was_ended(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "AT_ONCE", 1)  # the first file is whole when the second fails
    model = pushed(registry, as_oras_pushes(files))
    registry.faults.cuts = {digest_of(files[SECOND]): [200_000] + [0] * 50}
    with pytest.raises(ModelError, match=f"{SECOND} stopped at 200000 of {SHARD_BYTES} bytes"):
        fetch(model, options)
    registry.faults.cuts = {}
    registry.asked.clear()
    fetched(model, options)
    assert [one.range for one in registry.asked_for(files[SECOND])] == ["bytes=200000-"]
    assert registry.asked_for(files[FIRST]) == []


def test_a_registry_that_begins_anew_is_followed(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    registry.faults.cuts, registry.faults.ignores_range = {digest_of(files[FIRST]): [100_000]}, True
    assert contents(fetched(pushed(registry, as_oras_pushes(files)), options))[FIRST] == files[FIRST]


def test_wrong_layer_checksum_is_retried_then_rejected(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    registry.faults.wrong = {digest_of(files["config.json"]): 1, digest_of(files[FIRST]): 99}
    with pytest.raises(ModelError, match=f"{FIRST} was received 2 times with a wrong checksum"):
        fetch(model, options)
    assert options.folder is not None
    assert not [*ModelCache.of(options.folder, model).folder.glob(f"snapshots/*/{FIRST}")]


def test_a_manifest_with_another_digest_is_refused(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    registry.faults.wrong = {"v1": 1}
    with pytest.raises(ModelError, match=r"has digest sha256:\w+, not sha256:\w+; something between"):
        fetch(model, options)


def test_a_registry_that_stumbles_is_asked_again(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    registry.faults.statuses = [503, 429, 500]
    with pytest.raises(SourceUnavailable, match="answers 500; try again later"):
        fetch(model, options)
    registry.faults.statuses = [502]
    fetched(model, options)


def test_cached_model_is_served_if_registry_is_unavailable(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    known = fetched(model, options)
    registry.faults.statuses = [503] * 9
    assert fetched(model, options).path == known.path
    with pytest.raises(SourceUnavailable, match=r"http://127\.0\.0\.1:9 cannot be reached .*--registry-plain-http"):
        fetch(RemoteModel(Scheme.OCI, "127.0.0.1:9/llms/other"), options)


# --- accounts ---------------------------------------------------------------------------------------------------------


def docker_config(path: Path, host: str, account: str) -> Path:
    auth = base64.b64encode(account.encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return path


@pytest.mark.parametrize("basic", [False, True])
def test_a_private_model_wants_an_account_which_goes_to_the_registry_alone(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, tmp_path: Path, basic: bool
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    registry.faults = Faults(account="user:right", basic=basic, redirects=True)
    with pytest.raises(ModelError, match=r"no such public model .*--registry-auth-file, or spec\.model"):
        fetch(model, options)
    wrong = docker_config(tmp_path / "wrong.json", registry.host, "user:wrong")
    with pytest.raises(ModelError, match=r"does not let user pull it"):
        fetch(model, replace(options, registry_auth_file=wrong))
    right = docker_config(tmp_path / "right.json", registry.host, "user:right")
    fetched(model, replace(options, registry_auth_file=right))
    elsewhere = [one for one in registry.asked if one.path.startswith("/elsewhere/")]
    assert elsewhere
    assert all(one.authorization is None for one in elsewhere)


def test_account_is_never_sent_to_a_realm_without_tls(tmp_path: Path) -> None:
    requested: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requested.append(str(request.url))
        return httpx.Response(401, headers={"WWW-Authenticate": 'Bearer realm="http://tokens.example/token"'})

    model = RemoteModel(Scheme.OCI, "registry.example/llms/tiny")
    accounts = docker_config(tmp_path / "accounts.json", "registry.example", "user:right")
    reached = RegistrySource.reached(model, plain_http=False, auth_file=accounts)
    source = replace(reached, client=httpx.Client(transport=httpx.MockTransport(respond)))
    with pytest.raises(ModelError, match=r"http://tokens\.example/token, without TLS"):
        source.ask(model, patient=False)
    assert all(url.startswith("https://registry.example/") for url in requested)


def test_redirect_target_gets_no_credentials(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, tmp_path: Path
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    registry.faults = Faults(account="user:right", redirects=True, greedy=True)
    right = docker_config(tmp_path / "right.json", registry.host, "user:right")
    with pytest.raises(ModelError):
        fetch(model, replace(options, registry_auth_file=right))
    assert not [one for one in registry.asked if "of=elsewhere" in one.path]


def test_a_server_of_tokens_that_is_busy_is_asked_again(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions, tmp_path: Path
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    registry.faults = Faults(account="user:right", busy_tokens=1)
    right = docker_config(tmp_path / "right.json", registry.host, "user:right")
    found = fetched(model, replace(options, registry_auth_file=right))
    assert contents(found)["config.json"] == files["config.json"]


def test_an_image_on_top_of_another_takes_nothing_of_that_away(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    archive = Layer(tar_of(under("models/tiny", files)), TAR)
    newer = Layer(tar_of({"models/tiny/config.json": b'{"architectures": ["Newer"]}'}), TAR)
    name = f"llms/tiny-{next(NUMBERS)}"
    registry.push(name, "v1", [archive])
    registry.push(name, "v2", [archive, newer])
    first, second = (fetched(RemoteModel(Scheme.OCI, f"{registry.host}/{name}", tag), options) for tag in ("v1", "v2"))
    assert contents(first) == {name: data for name, data in files.items() if name in LOADED}
    assert contents(second)["config.json"] == b'{"architectures": ["Newer"]}'


def test_files_of_one_content_come_once(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    twice = {**files, "special_tokens_map.json": files["tokenizer.json"]}
    found = fetched(pushed(registry, as_oras_pushes(twice)), options)
    assert contents(found)["special_tokens_map.json"] == contents(found)["tokenizer.json"] == files["tokenizer.json"]


def test_accounts_are_found_as_docker_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    auths = {
        "registry.example.com": {"username": "a", "password": "b"},
        "https://index.docker.io/v1/": {"auth": base64.b64encode(b"me:p:w").decode()},
        "token.example.com": {"identitytoken": "t"},
    }
    path.write_text(json.dumps({"auths": auths, "credHelpers": {"helped.example.com": "gcloud"}}))
    assert account_of("registry.example.com", path) == Account("a", "b")
    assert account_of("docker.io", path) == Account("me", "p:w")
    assert account_of("token.example.com", path) == Account("", "", "t")
    assert account_of("other.example.com", path) is None
    with pytest.raises(ConfigError, match=r"leaves helped\.example\.com to the helper gcloud"):
        account_of("helped.example.com", path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        account_of("registry.example.com", path)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_repository_and_a_tag_that_are_not_there_are_named(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    with pytest.raises(ModelError, match=r"has no tag v9 in llms/tiny-\d+ \(MANIFEST_UNKNOWN\); check both"):
        fetch(replace(model, revision="v9"), options)
    with pytest.raises(ModelError, match="has no repository llms/none; check the spelling"):
        fetch(replace(model, place=f"{registry.host}/llms/none"), options)
    registry.blobs.pop(digest_of(files[FIRST]))
    with pytest.raises(ModelError, match=r"has lost a layer of it \(BLOB_UNKNOWN\)"):
        fetch(model, options)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([Layer(b"x", "application/vnd.example.chart+gzip")], r"nothing that is known as files.*example\.chart\+gzip"),
        ([], r"nothing that is known as files of a model \(no layers\)"),
        ([Layer(b"x", f"{MODELPACK}.weight.v1.tar+zstd")], r"zstd is not supported: pack it as plain tar"),
        ([Layer(b"x", TAR, {TITLE: "pytorch_model.bin"})], r"pytorch_model\.bin only.*never loaded"),
        ([Layer(tar_of({"m/pytorch_model.bin": b"x"}))], r"pytorch_model\.bin only.*never loaded"),
        ([Layer(tar_of({"etc/passwd": b"x"}))], r"has neither safetensors nor a \.gguf file"),
        ([Layer(b"no archive at all" * 99)], r"layer 1 is no archive that could be unpacked"),
        (
            [Layer(tar_of({"a/model.safetensors": b"x", "b/model.safetensors": b"x"}))],
            r"holds several models \(a, b\); push each by itself",
        ),
        (
            [Layer(b"x", TAR, {TITLE: "a.gguf"}), Layer(b"y", TAR, {TITLE: "b.gguf"})],
            r"2 GGUF files \(a\.gguf, b\.gguf\); pack the one that is wanted by itself",
        ),
    ],
)
def test_artifact_without_model_is_reported_by_type(
    registry: RegistryServer, options: FetchOptions, layers: list[Layer], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        fetch(pushed(registry, layers), options)


def test_an_archive_for_which_there_is_no_room_is_said_before_it_comes(
    registry: RegistryServer, files: dict[str, bytes], options: FetchOptions
) -> None:
    (layer,) = layers = [Layer(tar_of(files))]
    small = replace(options, limit_bytes=len(layer.data))
    with pytest.raises(ModelError, match=r"the cache .* may hold .*raise --download-dir-size"):
        fetch(pushed(registry, layers), small)
    assert registry.asked_for(layer.data) == []


def test_names_of_layers_stay_within_the_model() -> None:
    model = RemoteModel(Scheme.OCI, "r.example.com/m")
    layer = Layer(b"x", TAR, {TITLE: "../config.json"}).described
    assert layers_of(model, {"layers": [layer]})[0] == ()
    several = [RemoteFile(name, 1, "d") for name in ("a/b/model.safetensors", "a/model.safetensors", "a/config.json")]
    assert [file.name for file in in_its_folder(model, several)] == [
        "b/model.safetensors",
        "model.safetensors",
        "config.json",
    ]


def test_fetch_prints_the_folder(
    registry: RegistryServer, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pushed(registry, as_oras_pushes(files))
    assert main(["fetch", str(model), "--download-dir", str(tmp_path / "cache")]) == 0
    assert Path(capsys.readouterr().out.strip(), FIRST).stat().st_size == SHARD_BYTES


# --- a registry that is none of ours ----------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("docker-registry") is None, reason="Debian's docker-registry is not installed")
def test_a_model_comes_from_dockers_own_registry(
    files: dict[str, bytes], options: FetchOptions, tmp_path: Path
) -> None:
    ports = ReservedPorts("127.0.0.1")  # no other process gets the port before the registry listens
    port = ports.take()
    settings = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}}
    settings["http"] = {"addr": f"127.0.0.1:{port}"}
    (tmp_path / "config.yml").write_text(json.dumps(settings))
    command = ["docker-registry", "serve", str(tmp_path / "config.yml")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}/v2/llms"
            for name, packed in (("oras", as_oras_pushes), ("image", as_image)):
                digest = _push(f"{url}/{name}", packed(files))
                found = fetched(RemoteModel(Scheme.OCI, f"127.0.0.1:{port}/llms/{name}", "v1"), options)
                assert found.commit == digest
                assert set(contents(found)) == LOADED
                described = describe(found.model, options, tmp_path / f"described {name}")
                assert described.weights_bytes == 2 * SHARD_BYTES
            with pytest.raises(ModelError, match="has no tag v9 in llms/oras"):
                fetch(RemoteModel(Scheme.OCI, f"127.0.0.1:{port}/llms/oras", "v9"), options)
            with pytest.raises(ModelError, match=r"no .*llms/none"):
                fetch(RemoteModel(Scheme.OCI, f"127.0.0.1:{port}/llms/none"), options)
        finally:
            process.terminate()
            ports.release()


def _push(repository: str, layers: Sequence[Layer]) -> str:
    """Push as the specification describes; return the manifest's digest."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=60) as client:
        for data in (b"{}", *(layer.data for layer in layers)):
            place = _first_answer(client, f"{repository}/blobs/uploads/").headers["Location"]
            client.put(httpx.URL(place).copy_add_param("digest", digest_of(data)), content=data).raise_for_status()
        text = manifest_of(layers)
        client.put(f"{repository}/manifests/v1", content=text, headers={"Content-Type": IMAGE}).raise_for_status()
    return digest_of(text)


def _first_answer(client: httpx.Client, url: str) -> httpx.Response:
    """A registry that has just been started answers a little later."""
    for _ in range(600):
        try:
            return client.post(url).raise_for_status()
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")
