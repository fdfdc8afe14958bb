import msgspec
import pytest
from trimtab_engine.config.json_flags import convert_fields, read_json_object
from trimtab_engine.errors import ConfigError, NotSupportedError

EXAMPLE = '{"width": 3}'


class Size(msgspec.Struct):
    width: int

    def __post_init__(self) -> None:
        if self.width > 9:
            raise NotSupportedError(f"--size: width {self.width} is not supported; use 9 or less")


def test_the_fields_of_an_object_are_read() -> None:
    assert read_json_object("--size", EXAMPLE, EXAMPLE) == {"width": 3}


@pytest.mark.parametrize(("text", "wrong"), [("{width: 3}", "is not JSON"), ("[3]", "must be a JSON object")])
def test_non_object_is_rejected_with_example(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^--size {wrong}.*") as refused:
        read_json_object("--size", text, EXAMPLE)
    assert str(refused.value).endswith(EXAMPLE)


def test_a_field_of_another_type_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^--size: Expected `int`, got `str` - at `\$\.width`$"):
        convert_fields("--size", {"width": "3"}, Size)


def test_type_errors_are_raised_unchanged() -> None:
    with pytest.raises(NotSupportedError, match=r"^--size: width 10 is not supported; use 9 or less$"):
        convert_fields("--size", {"width": 10}, Size)
