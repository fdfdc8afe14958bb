"""vLLM's flags that are known but not supported: rejected by name, unless their value has no effect."""

import argparse
from collections.abc import Sequence

from trimtab_engine.errors import NotSupportedError
from trimtab_engine.flags.parser import UnsupportedFlag

# Flag: values without effect. None is the flag without a value.
UNSUPPORTED: dict[str, tuple[str | None, ...]] = {
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


class _NotBuilt(UnsupportedFlag):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or ""
        harmless = UNSUPPORTED[flag]
        if (values or None) in harmless:
            return
        only = [value for value in harmless if value is not None]
        hint = f" other than {' or '.join(only)}" if only else ""
        remedy = (
            "remove it; code from model repositories is never executed"
            if flag == "--trust-remote-code"
            else "remove it"
        )
        parser.error(str(NotSupportedError(f"{flag}{hint} is not supported yet; {remedy}")))


def add_unsupported_flags(parser: argparse.ArgumentParser) -> None:
    """Register these flags with the parser, hidden from --help."""
    for flag in UNSUPPORTED:
        if UNSUPPORTED[flag] == (None,):  # a switch: the next argument is not its value but may be MODEL
            parser.add_argument(flag, action=_NotBuilt, nargs=0, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
            continue
        parser.add_argument(
            flag, action=_NotBuilt, nargs="?", metavar="VALUE", help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )
