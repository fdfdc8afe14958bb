"""Triton's specialisation of a recorded launch: argument types, constants, and values divisible by 16.

The rules are those of Triton's own launcher (an integer 1 is a constant; pointers and integers divisible by 16 are
marked), from triton/runtime/jit.py. If they differed, another variant would be compiled than is launched.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from trimtab_kernels.launch.jit import Launch

ALIGNMENT = 16
"""Bytes of a pointer, or value of an integer, that allows vector loads."""
DIVISIBLE = [["tt.divisibility", ALIGNMENT]]
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Specialisation:
    """Arguments of `triton.compiler.ASTSource`. Indices of constants and attributes are positions of parameters."""

    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]

    @property
    def text(self) -> str:
        """Equal for equal specialisations."""
        return f"{self.signature} {sorted(self.constants.items(), key=str)} {sorted(self.attributes)}"


def specialise(launch: Launch) -> Specialisation:
    """Return the specialisation of a launch.

    Raises:
        KeyError: an argument without default is missing, or a dtype is not supported.
    """
    function = launch.kernel.function
    defaults = inspect.signature(getattr(function, "fn", function)).parameters
    result = Specialisation({}, {}, {})
    for index, name in enumerate(function.arg_names):
        parameter = defaults[name]
        value = launch.arguments.get(name, parameter.default)
        if value is inspect.Parameter.empty:
            raise KeyError(f"{launch.kernel.name} was launched without {name}")
        is_constant = "constexpr" in str(getattr(parameter.annotation, "__name__", parameter.annotation))
        _add(result, index, name, value, is_constant, varies=name in launch.kernel.varying)
    return result


def _add(result: Specialisation, index: int, name: str, value: Any, is_constant: bool, *, varies: bool) -> None:
    key = (index,)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_constant or value is None or (is_int and value == 1 and not varies):
        result.signature[name] = "constexpr"
        result.constants[key] = value
    elif isinstance(value, torch.Tensor):
        result.signature[name] = POINTERS[value.dtype]
        if value.storage_offset() * value.element_size() % ALIGNMENT == 0 and not varies:
            result.attributes[key] = DIVISIBLE
    elif hasattr(value, "block_shape"):
        result.signature[name] = _descriptor(value)
    elif isinstance(value, bool):
        result.signature[name] = "u1"
    elif is_int:
        result.signature[name] = "i32" if -INT32_MAX - 1 <= value <= INT32_MAX else "i64"
        if value % ALIGNMENT == 0 and not varies:
            result.attributes[key] = DIVISIBLE
    else:
        assert isinstance(value, float), f"{name} is a {type(value).__name__}"
        result.signature[name] = "fp32"


def _descriptor(value: Any) -> str:
    """Return the type of a tensor descriptor: its shape and strides are not specialised on."""
    box = ", ".join(map(str, value.block_shape))
    return f"tensordesc<{POINTERS[value.base.dtype].removeprefix('*')}[{box}],{value.layout!r}>"
