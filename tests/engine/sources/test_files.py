"""Selection of a repository's files."""

import json

import pytest
from trimtab_engine.errors import ModelError
from trimtab_engine.sources.files import MAX_TEXT_BYTES, Listing, RemoteFile, texts, weights
from trimtab_engine.sources.name import RemoteModel, Scheme

INDEX = "model.safetensors.index.json"


def a_listing(*names: str, model: RemoteModel = RemoteModel(Scheme.HUB, "org/name"), size: int = 1) -> Listing:  # noqa: B008 - frozen
    return Listing(model, "c" * 40, tuple(RemoteFile(name, size, "d" * 40) for name in names))


def named(files: tuple[RemoteFile, ...]) -> list[str]:
    return [file.name for file in files]


def test_configuration_tokenizer_and_template_come_and_nothing_that_could_run() -> None:
    wanted = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", INDEX]
    left = ["modeling_own.py", "README.md", "pytorch_model.bin.index.json", "onnx/config.json", "photo.png"]
    assert named(texts(a_listing(*wanted, *left))) == wanted


def test_how_hidden_states_are_pooled_comes_out_of_its_folder() -> None:
    wanted = ["modules.json", "1_Pooling/config.json"]
    left = ["2_Dense/config.json", "1_Pooling/other.json", "onnx/1_Pooling/config.json", "2_Normalize/config.json"]
    assert named(texts(a_listing(*wanted, *left))) == wanted


def test_a_text_that_is_too_large_is_none() -> None:
    assert texts(a_listing("data.json", size=MAX_TEXT_BYTES + 1)) == ()


def test_the_index_says_which_weights_there_are() -> None:
    listing = a_listing("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors", INDEX)
    index = json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}})
    assert named(weights(listing, index)) == ["model-1.safetensors", "model-2.safetensors"]


def test_single_file_has_priority_over_the_index() -> None:
    index = json.dumps({"weight_map": {"a": "model-2.safetensors"}})
    assert named(weights(a_listing("model.safetensors", INDEX), index)) == ["model.safetensors"]


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_an_index_that_says_nothing_is_refused(index: str) -> None:
    with pytest.raises(ModelError, match="another revision"):
        weights(a_listing(INDEX), index)


def test_without_an_index_the_one_file_comes_before_others() -> None:
    assert named(weights(a_listing("model.safetensors", "x.safetensors", "m.gguf"), None)) == ["model.safetensors"]
    assert named(weights(a_listing("x.safetensors", "m.gguf"), None)) == ["x.safetensors"]


def test_several_gguf_files_require_a_choice() -> None:
    assert named(weights(a_listing("m.gguf"), None)) == ["m.gguf"]
    with pytest.raises(ModelError, match=r"name one: hf://org/name/q4\.gguf"):
        weights(a_listing("q4.gguf", "q8.gguf"), None)
    one = RemoteModel(Scheme.HUB, "org/name", None, "q8.gguf")
    assert named(weights(a_listing("q4.gguf", "q8.gguf", model=one), None)) == ["q8.gguf"]


def test_split_gguf_model_is_fetched_whole() -> None:
    parts = [f"q4-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert named(weights(a_listing(*reversed(parts)), None)) == parts
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(q4-00001-of-00002\.gguf, q8\.gguf\)"):
        weights(a_listing(*parts, "q8.gguf"), None)
    first, second = (RemoteModel(Scheme.HUB, "org/name", None, part) for part in parts)
    assert named(weights(a_listing(*parts, "q8.gguf", model=first), None)) == parts
    with pytest.raises(ModelError, match=r"one of 2 parts of a model; name the first, q4-00001-of-00002\.gguf"):
        weights(a_listing(*parts, model=second), None)
    with pytest.raises(ModelError, match=r"has no file q4-00002-of-00002\.gguf"):
        weights(a_listing(parts[0], model=first), None)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match=r"has no file q2\.gguf"):
        weights(a_listing("q4.gguf", model=RemoteModel(Scheme.HUB, "org/name", None, "q2.gguf")), None)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_by_name_with_what_to_do(name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} only.*never loaded.*safetensors.*refs/pr/N"):
        weights(a_listing("config.json", name), None)


def test_a_repository_without_weights_is_refused() -> None:
    with pytest.raises(ModelError, match=r"neither safetensors nor a \.gguf file"):
        weights(a_listing("config.json", "folder/model.safetensors"), None)
