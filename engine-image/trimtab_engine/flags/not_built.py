"""vLLM's flags that are known but not supported yet: refused by name, unless their value asks for nothing."""

import argparse
from collections.abc import Sequence

from trimtab_engine.errors import NotSupportedError
from trimtab_engine.flags.parser import RefusedFlag

# Flag: values that ask for nothing. None stands for the flag without a value.
NOT_BUILT: dict[str, tuple[str | None, ...]] = {
    "--data-parallel-backend": ("mp",),
    "--enable-elastic-ep": (),
    "--cpu-offload-gb": ("0",),
    "--default-mm-loras": (),
    "--enable-lora-bias": (),
    "--enable-sleep-mode": (),
    "--enable-tower-connector-lora": (),
    "--fully-sharded-loras": (),
    "--kv-offloading-size": ("0",),
    "--lora-dtype": ("auto",),
    "--performance-mode": ("balanced",),
    "--root-path": (),
    "--ssl-certfile": (),
    "--ssl-keyfile": (),
    "--trust-remote-code": (),
    "--uds": (),
}


class _NotBuilt(RefusedFlag):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or ""
        harmless = NOT_BUILT[flag]
        if (values or None) in harmless:
            return
        only = [value for value in harmless if value is not None]
        hint = f" other than {' or '.join(only)}" if only else ""
        remedy = "the model's code never runs here" if flag == "--trust-remote-code" else "leave it out"
        parser.error(str(NotSupportedError(f"{flag}{hint} is not supported yet; {remedy}")))


def add_not_built(parser: argparse.ArgumentParser) -> None:
    """Make the parser know them, without showing them in --help."""
    for flag in NOT_BUILT:
        if NOT_BUILT[flag] == (None,):  # a switch: what follows it is not its value but, perhaps, MODEL
            parser.add_argument(flag, action=_NotBuilt, nargs=0, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
            continue
        parser.add_argument(
            flag, action=_NotBuilt, nargs="?", metavar="VALUE", help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )
