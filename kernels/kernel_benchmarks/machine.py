"""Checks that this machine can run GPU commands, before anything else is imported.

`python -m kernel_benchmarks.machine COMMAND` exits with 0 if it can, otherwise with 2 and one line that names the
missing part. Packages that the folder of wheels (wheels.py) provides are not required.
"""

import sys
from importlib.util import find_spec

from kernel_benchmarks.phase import DONE, NO_GPU


def missing_requirement() -> str | None:
    """Return the first missing requirement with its remedy, or None."""
    for name in ("torch", "triton"):
        if find_spec(name) is None:
            return (
                f"{name} is not installed for {sys.executable}; name a Python that has torch with CUDA, triton, "
                "transformers and numpy: make … BENCH_PYTHON=PATH"
            )
    import torch  # not at the top: its absence is the condition to report

    if torch.version.cuda is None:
        return f"torch {torch.__version__} there is built without CUDA; name another Python: make … BENCH_PYTHON=PATH"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (nvidia-smi lists the driver's devices); run it on a GPU machine"
    return None


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m kernel_benchmarks.machine COMMAND")
    (command,) = arguments
    missing = missing_requirement()
    if missing is None:
        return DONE
    print(f"{command}: {missing}; nothing was run", file=sys.stderr)
    return NO_GPU


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
