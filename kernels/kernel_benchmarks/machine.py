"""Checks that this machine can run GPU commands, before anything else is imported.

`python -m kernel_benchmarks.machine COMMAND` exits with 0 if it can, otherwise with 2 and one line that names the
missing part. Packages that the folder of wheels (wheels.py) provides are not required.
"""

import sys
from importlib.util import find_spec

from kernel_benchmarks.phase import DONE, NO_GPU


def what_is_missing() -> str | None:
    """The first thing that is not there, and what to do; None: nothing."""
    for name in ("torch", "triton"):
        if find_spec(name) is None:
            return (
                f"{name} is not installed for {sys.executable}; name a Python that has torch with CUDA, triton, "
                "transformers and numpy: make … BENCH_PYTHON=PATH"
            )
    import torch  # not at the top: its absence is what is asked about

    if torch.version.cuda is None:
        return f"torch {torch.__version__} there is built without CUDA; name another Python: make … BENCH_PYTHON=PATH"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here (nvidia-smi lists what the driver sees); run it on a GPU machine"
    return None


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m kernel_benchmarks.machine COMMAND")
    (command,) = arguments
    missing = what_is_missing()
    if missing is None:
        return DONE
    print(f"{command}: {missing}; nothing was run", file=sys.stderr)
    return NO_GPU


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
