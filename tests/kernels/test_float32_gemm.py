"""float32 stays float32 on a GPU: Triton's own choice for products there is tf32, whose mantissa has 10 bits. The
interpreter multiplies exactly whatever is asked, so the source is looked at."""

import ast
from pathlib import Path

import trimtab_kernels

PRECISION = "tf32x3"  # three tf32 products, on the matrix units; 16-bit and float8 operands compile to the same code


def products() -> list[tuple[str, ast.Call]]:
    """Where, and what, of every `tl.dot` in the kernels."""
    folder = Path(trimtab_kernels.__file__).parent
    return [
        (f"{file.relative_to(folder)}:{node.lineno}", node)
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"
    ]


def test_every_product_of_a_kernel_says_how_precise_float32_is() -> None:
    found = products()
    assert found, "the kernels multiply by tl.dot"
    for where, call in found:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said.get("input_precision") == repr(PRECISION), where
