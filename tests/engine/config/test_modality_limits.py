"""Image and video limits in vLLM's format; invalid parts are reported, never ignored."""

import pytest
from trimtab_engine.config.modality_limits import parse_modality_limits
from trimtab_engine.errors import ConfigError, NotSupportedError


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("{}", (999, 999)),
        ('{"image": 2}', (2, 999)),
        ('{"image": 2, "video": 0}', (2, 0)),
        ('{"image": {"count": 3}, "video": {}}', (3, 999)),
        ('{"image": 1, "audio": 0}', (1, 999)),  # vLLM's users write it so
    ],
)
def test_a_kind_that_is_not_named_has_vllm_s_number(text: str, limits: tuple[int, int]) -> None:
    assert parse_modality_limits(text) == {"image": limits[0], "video": limits[1]}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("image=2", ConfigError, 'is not JSON.*write \'{"image": 2'),
        ("[2]", ConfigError, "must be a JSON object"),
        ('{"images": 2}', ConfigError, "has 'images'; did you mean image?"),
        ('{"sound": 2}', ConfigError, "has 'sound'; its keys are image and video"),
        ('{"image": -1}', ConfigError, "image is -1; write a whole number from 0 to 10000"),
        ('{"image": 1.5}', ConfigError, "image is 1.5"),
        ('{"image": true}', ConfigError, "image is True"),
        ('{"image": "2"}', ConfigError, "image is 2"),
        ('{"image": null}', ConfigError, "image is None"),
        ('{"image": 1000000}', ConfigError, "image is 1000000"),
        ('{"image": {"count": -1}}', ConfigError, "image is -1"),
        ('{"video": {"count": 1, "num_frames": 32}}', NotSupportedError, r"video\.num_frames is not supported yet"),
        ('{"audio": 1}', NotSupportedError, "audio input is not supported yet"),
    ],
)
def test_invalid_limit_is_reported(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^--limit-mm-per-prompt.*{words}"):
        parse_modality_limits(text)
