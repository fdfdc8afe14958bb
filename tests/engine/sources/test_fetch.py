"""Fetching of hub models into the cache, with faults."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.hub_server import HubServer
from hub_repository import REPO, SHARD_BYTES, a_repository
from huggingface_hub import constants
from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.sources import source, transfer
from trimtab_engine.sources.cache import ModelCache
from trimtab_engine.sources.fetch import Fetched, fetch
from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.sources.progress import Progress
from trimtab_engine.sources.source import FetchOptions

MODEL = RemoteModel(Scheme.HUB, REPO)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No delay between attempts."""
    monkeypatch.setattr(source, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(transfer, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(
        constants, "DOWNLOAD_CHUNK_SIZE", 10_000
    )  # less than a chunk of an interrupted transfer is lost
    monkeypatch.setattr(transfer, "MAX_FRUITLESS", 2)


@pytest.fixture
def options(hub: HubServer, tmp_path: Path) -> FetchOptions:
    return FetchOptions(folder=tmp_path / "cache", endpoint=hub.url)


def fetched(model: RemoteModel, options: FetchOptions) -> Fetched:
    found = fetch(model, options)
    found.close()
    return found


def test_weights_and_texts_come_and_nothing_else(hub: HubServer, options: FetchOptions) -> None:
    found = fetched(MODEL, options)
    names = {path.name for path in found.path.iterdir()}
    assert names == {FIRST, SECOND, "model.safetensors.index.json", "config.json", "tokenizer.json"}
    for name in names:
        assert (found.path / name).read_bytes() == (hub.repos[REPO] / name).read_bytes()


def test_the_revision_is_pinned_to_the_commit_that_it_means_now(hub: HubServer, options: FetchOptions) -> None:
    found = fetched(replace(MODEL, revision="main"), options)
    assert found.commit == hub.commit(REPO)
    assert found.model == RemoteModel(Scheme.HUB, REPO, found.commit)


def test_a_commit_that_is_here_asks_nobody(hub: HubServer, options: FetchOptions) -> None:
    pinned = fetched(MODEL, options).model
    hub.asked.clear()
    assert fetched(pinned, options).model == pinned
    assert hub.asked == []


def test_a_branch_that_moved_brings_the_new_commit_and_keeps_the_old_one(
    hub: HubServer, options: FetchOptions, tmp_path: Path
) -> None:
    before = fetched(MODEL, options)
    hub.repos[REPO] = a_repository(tmp_path / "hub" / "moved", seed=7)
    after = fetched(MODEL, options)
    assert after.commit != before.commit
    assert after.path.joinpath(FIRST).read_bytes() != before.path.joinpath(FIRST).read_bytes()


def test_a_download_that_was_cut_goes_on_where_it_was(hub: HubServer, options: FetchOptions) -> None:
    hub.faults.cuts = {FIRST: [100_000, 50_000]}
    found = fetched(MODEL, options)
    assert found.path.joinpath(FIRST).read_bytes() == (hub.repos[REPO] / FIRST).read_bytes()
    begun = [int(one.range[6:-1]) for one in hub.asked_for(FIRST) if one.range and one.path.startswith("/large")]
    assert begun == [100_000, 150_000]


def test_another_process_goes_on_where_the_first_was_ended(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "AT_ONCE", 1)  # the first file is whole when the second fails
    hub.faults.cuts = {SECOND: [200_000] + [0] * 50}
    with pytest.raises(ModelError, match=f"{SECOND} stopped at 200000 of {SHARD_BYTES} bytes"):
        fetch(MODEL, options)
    hub.faults.cuts, hub.asked = {}, []
    fetched(MODEL, options)
    assert {one.range for one in hub.asked_for(SECOND)} == {"bytes=200000-"}
    assert hub.asked_for(FIRST) == []


def test_a_server_that_begins_anew_is_followed(hub: HubServer, options: FetchOptions) -> None:
    hub.faults.cuts, hub.faults.ignores_range = {FIRST: [100_000]}, True
    found = fetched(MODEL, options)
    assert found.path.joinpath(FIRST).read_bytes() == (hub.repos[REPO] / FIRST).read_bytes()


@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_a_file_that_came_wrong_is_fetched_again(hub: HubServer, options: FetchOptions, name: str) -> None:
    hub.faults.wrong = {name: 1}
    found = fetched(MODEL, options)
    assert found.path.joinpath(name).read_bytes() == (hub.repos[REPO] / name).read_bytes()


def test_a_file_that_always_comes_wrong_is_never_used(hub: HubServer, options: FetchOptions) -> None:
    hub.faults.wrong = {FIRST: 99}
    with pytest.raises(ModelError, match=f"{FIRST} was received 2 times with a wrong checksum"):
        fetch(MODEL, options)
    assert options.folder is not None
    model_cache = ModelCache.of(options.folder, MODEL)
    assert not model_cache.is_complete(hub.commit(REPO), None)
    assert not model_cache.snapshot(hub.commit(REPO)).joinpath(FIRST).exists()


def test_a_hub_that_stumbles_is_asked_again(hub: HubServer, options: FetchOptions) -> None:
    hub.faults.statuses = [503, 429, 500]
    with pytest.raises(source.SourceUnavailable, match="answers 500; try again later"):
        fetch(MODEL, options)
    hub.faults.statuses = [502]
    fetched(MODEL, options)


def test_cached_model_is_served_if_hub_is_unavailable(
    hub: HubServer, options: FetchOptions, caplog: pytest.LogCaptureFixture
) -> None:
    known = fetched(MODEL, options)
    assert fetched(MODEL, replace(options, endpoint="http://127.0.0.1:9")).path == known.path
    assert "which the cache has" in caplog.text
    with pytest.raises(ModelError, match=r"cannot be reached .*HTTPS_PROXY or HF_ENDPOINT"):
        fetch(RemoteModel(Scheme.HUB, "org/other"), replace(options, endpoint="http://127.0.0.1:9"))


def test_offline_the_cache_alone_is_asked(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = fetched(MODEL, options)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched(MODEL, options).path == known.path
    unset = r"no hf://org/other either \(the hub is not used, as HF_HUB_OFFLINE .* is set: unset it\)"
    with pytest.raises(ModelError, match=unset + ".*hf download org/other"):
        fetch(RemoteModel(Scheme.HUB, "org/other"), options)
    assert hub.asked == []


def test_offline_what_another_tool_fetched_is_found(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetched(MODEL, options)
    assert options.folder is not None
    shutil.rmtree(ModelCache.of(options.folder, MODEL).own)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched(MODEL, options).path == found.path
    found.path.joinpath(SECOND).unlink()
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch(MODEL, options)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"sha": "/models/others/snapshots/1"}, "has no commit for it"),
        ({"sha": "b" * 40}, "answers with the commit b+;"),
        ({"digest": "../../outside"}, "digest of .* is none"),
    ],
)
def test_a_mirror_that_lies_writes_nowhere_else(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch, lie: dict[str, str], words: str
) -> None:
    commit = hub.commit(REPO)
    hub.revisions = (commit,)
    monkeypatch.setattr(hub, "commit", lambda repo: lie.get("sha", commit))
    if "digest" in lie:
        monkeypatch.setattr(hub, "digest", lambda path: lie["digest"])
    with pytest.raises(ModelError, match=words):
        fetch(replace(MODEL, revision=commit), options)


def test_a_misspelt_name_is_said_to_be_one(options: FetchOptions) -> None:
    with pytest.raises(ModelError, match=r"no such model that is public \(401\).*org/tyni is spelt.*HF_TOKEN"):
        fetch(RemoteModel(Scheme.HUB, "org/tyni"), options)


def test_a_revision_that_is_not_there_is_said(options: FetchOptions) -> None:
    with pytest.raises(ModelError, match="no such revision; name a branch, a tag or a commit"):
        fetch(replace(MODEL, revision="v9"), options)


def test_a_gated_model_says_whose_terms_to_accept(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.gated = True
    with pytest.raises(ModelError, match=rf"is gated \(403\); accept its terms at {hub.url}/{REPO}.*tokenSecretRef"):
        fetch(MODEL, options)
    monkeypatch.setenv("HF_TOKEN", "mine")
    with pytest.raises(ModelError, match=r"with the token's account$"):
        fetch(MODEL, options)


def test_a_token_opens_a_private_model_and_goes_to_the_hub_alone(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.token = "right"
    with pytest.raises(ModelError, match="give a token: HF_TOKEN"):
        fetch(MODEL, options)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ModelError, match=r"refuses the token \(401\)"):
        fetch(MODEL, options)
    monkeypatch.setenv("HF_TOKEN", "right")
    fetched(MODEL, options)


def test_a_disk_that_is_too_small_is_said_before_any_weight_comes(
    hub: HubServer, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=SHARD_BYTES)
    monkeypatch.setattr("trimtab_engine.sources.cache.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"1 MB are still missing, and .* has 0 MB free; use a larger volume"):
        fetch(MODEL, options)
    assert hub.asked_for(FIRST) == []


def test_a_folder_that_cannot_be_written_is_named(hub: HubServer, options: FetchOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*--download-dir"):
        fetch(MODEL, replace(options, folder=tmp_path / "file"))


def test_random_weights_need_the_texts_alone(hub: HubServer, options: FetchOptions) -> None:
    found = fetched(MODEL, replace(options, has_weights=False))
    assert found.path.joinpath("config.json").exists()
    assert hub.asked_for(FIRST) == []


def test_progress_is_told_from_the_first_byte_to_the_last(hub: HubServer, options: FetchOptions) -> None:
    told: list[Progress] = []
    hub.faults.chunk_seconds = 0.02
    fetch(MODEL, options, told.append).close()
    assert told[0].sentence == f"Asking for {MODEL}"
    assert {progress.total_bytes for progress in told[1:]} == {2 * SHARD_BYTES}


# --- room -------------------------------------------------------------------------------------------------------------


def with_another(hub: HubServer, tmp_path: Path, name: str) -> RemoteModel:
    hub.repos[name] = a_repository(tmp_path / "hub" / name, seed=len(hub.repos))
    return RemoteModel(Scheme.HUB, name)


ROOM_FOR_TWO = FetchOptions(limit_bytes=2 * 2 * SHARD_BYTES + 10_000)


def test_the_longest_unused_model_goes_when_room_is_needed(
    hub: HubServer, options: FetchOptions, tmp_path: Path
) -> None:
    options = replace(options, limit_bytes=ROOM_FOR_TWO.limit_bytes)
    models = [with_another(hub, tmp_path, f"org/m{number}") for number in range(3)]
    assert options.folder is not None
    found = [fetched(model, options) for model in models[:2]]
    for age, one in ((10, found[0]), (100, found[1])):  # the second was used longer ago
        use = ModelCache.of(options.folder, one.model).used(one.commit)
        os.utime(use, (use.stat().st_mtime - age,) * 2)
    fetched(models[2], options)
    assert found[0].path.exists()
    assert not found[1].path.exists()
    assert not [*ModelCache.of(options.folder, models[1]).folder.glob("blobs/*")]


def test_a_download_that_was_given_up_goes_too(hub: HubServer, options: FetchOptions, tmp_path: Path) -> None:
    hub.repos["org/other"] = a_repository(tmp_path / "hub/org/other", seed=1)
    hub.faults.wrong[FIRST] = 9
    with pytest.raises(ModelError, match="a wrong checksum"):
        fetch(replace(MODEL, place="org/other"), options)
    hub.faults.wrong.clear()
    begun = ModelCache.of(options.folder or Path(), replace(MODEL, place="org/other"))
    assert [*begun.folder.glob("blobs/*")]
    fetched(MODEL, replace(options, limit_bytes=2 * SHARD_BYTES + 4096))
    assert not [*begun.folder.glob("blobs/*")]


def test_a_model_in_use_never_goes(hub: HubServer, options: FetchOptions, tmp_path: Path) -> None:
    options = replace(options, limit_bytes=ROOM_FOR_TWO.limit_bytes)
    models = [with_another(hub, tmp_path, f"org/m{number}") for number in range(3)]
    running = [fetch(model, options) for model in models[:2]]
    with pytest.raises(ModelError, match=r"may hold 1 MB in all.*are in use; raise --download-dir-size"):
        fetch(models[2], options)
    assert all(one.path.exists() for one in running)
    running[0].close()
    fetched(models[2], options)
    assert not running[0].path.exists()
    running[1].close()


def test_without_a_limit_nothing_is_ever_deleted(hub: HubServer, options: FetchOptions, tmp_path: Path) -> None:
    found = [fetched(with_another(hub, tmp_path, f"org/m{number}"), options) for number in range(3)]
    assert all(one.path.exists() for one in found)


def test_retries_are_announced_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PAUSES_SECONDS", (0.01, 0.02))

    def fail() -> None:
        raise source.SourceUnavailable("the hub cannot be reached")

    with pytest.raises(source.SourceUnavailable):
        source.patiently(fail)
    assert caplog.messages == ["the hub cannot be reached; retrying for 0 s"]
