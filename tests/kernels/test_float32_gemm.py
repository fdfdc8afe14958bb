"""float32 stays float32 on a GPU: Triton's default for `tl.dot` is tf32, whose mantissa has 10 bits. The interpreter
always multiplies exactly, so the source is checked.
"""

import ast
from pathlib import Path

import trimtab_kernels

PRECISION = "tf32x3"  # three tf32 GEMMs on the matrix units; 16-bit and float8 operands compile to the same code


def products() -> list[tuple[str, ast.Call]]:
    """Return the location and text of every `tl.dot` in the kernels."""
    folder = Path(trimtab_kernels.__file__).parent
    return [
        (f"{file.relative_to(folder)}:{node.lineno}", node)
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"
    ]


def test_every_dot_sets_float32_precision() -> None:
    found = products()
    assert found, "the kernels multiply by tl.dot"
    for where, call in found:
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keywords.get("input_precision") == repr(PRECISION), where
