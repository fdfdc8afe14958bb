"""argparse with one-line errors that suggest the nearest flag, and argument types with descriptive errors."""

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, NoReturn, get_args

from trimtab_modelspec.quantization import check_method

from trimtab_engine.config.engine import KVCacheDtype
from trimtab_engine.config.quantity import parse_quantity
from trimtab_engine.errors import NotSupportedError

LENGTH_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""Multipliers of vLLM's length suffixes: lower case is decimal, upper case is binary."""
MAX_INT64 = 2**63 - 1
MIN_FLAG_SIMILARITY = 0.8
MIN_CHOICE_SIMILARITY = 0.7  # for choices; higher than for flags, so that gpu does not suggest cpu


class UnsupportedFlag(argparse.Action):
    """Action of a known vLLM flag that is not supported: rejected by name, and never suggested."""


class OneLineParser(argparse.ArgumentParser):
    """Parser whose errors are one line on stderr with exit code 2. Flag abbreviations are off, so that new flags break
    no caller.
    """

    def __init__(self, **keywords: object) -> None:
        super().__init__(allow_abbrev=False, **keywords)  # type: ignore[arg-type]  # argparse's own keywords

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}{self._hint(message)}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)

    def _hint(self, message: str) -> str:
        command = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if command:
            names = re.findall(r"[\w.-]+", command.group(2))
            close = next(
                iter(difflib.get_close_matches(command.group(1), names, n=1, cutoff=MIN_CHOICE_SIMILARITY)), None
            )
            return f"; did you mean {close}?" if close else ""
        return ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse as argparse does, but report an unknown flag through the subcommand that received it.

        argparse reports it through the outermost parser, whose --help does not list the subcommand's flags. Rejected
        and unknown flags are reported together. As in vLLM, underscores in flags are dashes.
        """
        given = [_with_dashes(text) for text in (sys.argv[1:] if args is None else args)]
        parsed: argparse.Namespace
        parsed, rest = self.parse_known_args(given, namespace)
        command = self._innermost_command(given)
        problems = list(getattr(parsed, "rejected_flags", ()))
        if rest:
            problems.append(f"unrecognized arguments: {' '.join(rest)}{command._suggestions(rest)}")
        if problems:
            command.error("; ".join(problems))
        return parsed

    def _suggestions(self, unknown: Sequence[str]) -> str:
        """Return `; did you mean …?` for the unknown flags that resemble known ones."""
        names = [text.partition("=")[0] for text in unknown if text.startswith("--")]
        close = [(name, flag) for name in names if (flag := self.nearest_flag(name))]
        if len(names) == 1 and close:
            return f"; did you mean {close[0][1]}?"
        return "".join(f"; did you mean {flag} for {name}?" for name, flag in close)

    def _innermost_command(self, arguments: Sequence[str]) -> "OneLineParser":
        """Return the parser of the innermost command in these arguments."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for index, argument in enumerate(arguments):
                    if argument in action.choices:
                        child: OneLineParser = action.choices[argument]
                        return child._innermost_command(arguments[index + 1 :])
        return self

    def command(self, name: str) -> "OneLineParser":
        """Return the parser of a subcommand."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                parser: OneLineParser = action.choices[name]
                return parser
        raise KeyError(name)

    def dest_of(self, flag: str) -> str:
        """Return the attribute name of a flag (or of flag=value) in the parsed namespace."""
        return self._option_string_actions[flag.partition("=")[0]].dest

    def nearest_flag(self, flag: str) -> str | None:
        """Return the most similar flag, or None if none is close, or the closest is not supported or the opposite."""
        known = dict(self._flags())
        close = next(iter(difflib.get_close_matches(flag, known, n=1, cutoff=MIN_FLAG_SIMILARITY)), None)
        if close is None or isinstance(known[close], UnsupportedFlag) or _turns_off(close) != _turns_off(flag):
            return None
        return close

    def all_flags(self) -> list[str]:
        """Return every long flag of this command and of its subcommands."""
        return [flag for flag, _ in self._flags()]

    def _flags(self) -> Iterator[tuple[str, argparse.Action]]:
        for action in self._actions:
            for flag in action.option_strings:
                if flag.startswith("--"):
                    yield flag, action
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    yield from child._flags()


def _with_dashes(argument: str) -> str:
    """Return an argument with dashes in its flag: --max_num_seqs=4 → --max-num-seqs=4."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}"


def _turns_off(flag: str) -> bool:
    return flag.startswith(("--no-", "--disable-"))


STORED_METHODS = {
    **{method: method for method in ("awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "gguf")},
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
}
"""vLLM's --quantization for methods that a checkpoint is stored in, and quant_method of such a checkpoint."""
MAX_THREADS = 4096  # more than any machine needs; OpenMP crashes if it cannot start the requested threads
MAX_API_SERVERS = 64  # processes, each with its own tokenizer


def positive(text: str) -> int:
    return _integer(text, 1)


def threads(text: str) -> int:
    number = _integer(text, 1)
    if number > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_THREADS}; set at most the number of CPUs")
    return number


def api_servers(text: str) -> int:
    number = _integer(text, 1)
    if number > MAX_API_SERVERS:
        raise argparse.ArgumentTypeError(
            f"{text} is above {MAX_API_SERVERS}; one server handles hundreds of requests/s"
        )
    return number


def not_negative(text: str) -> int:
    return _integer(text, 0)


def port(text: str) -> int:
    number = _integer(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use 1 to 65535")
    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return number


def quantity(text: str) -> int:
    """Parse bytes: a plain number or a Kubernetes quantity such as 1500Mi or 2G."""
    size = parse_quantity(text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use bytes or a quantity such as 1500Mi or 2G")
    return size


def fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a fraction; use a number from 0 to 1, such as 0.01")
    return number


def swap_space(text: str) -> int:
    """Parse bytes: a plain number is GiB, as in vLLM, or a quantity such as 512Mi. 0 disables swap."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        return int(Fraction(text) * (1 << 30))
    return quantity(text)


def model_len(text: str) -> int | Literal["auto"]:
    """Parse tokens as vLLM does: 8192, 8k (8000), 8K (8192), 1.5M; auto or -1: the longest that fits."""
    if text in ("auto", "-1"):
        return "auto"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    length = Fraction(match.group(1)) * LENGTH_UNITS[match.group(2)] if match else Fraction(0)
    if length < 1 or length.denominator != 1 or length > MAX_INT64:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a number of tokens; use 8192, 8k (8000), 8K (8192), or auto for the longest that "
            f"fits"
        )
    return int(length)


def kv_cache_dtype(text: str) -> str:
    if text not in get_args(KVCacheDtype):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not one of {', '.join(get_args(KVCacheDtype))}")
    return text


def quantization(text: str) -> str:
    try:
        if text not in STORED_METHODS:
            check_method(text)
    except NotSupportedError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--quantization ")) from None
    return text


def block_size(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else positive(text)


def buckets(text: str) -> dict[str, list[float]]:
    """Parse upper bounds by family: a JSON object of increasing lists of numbers."""
    try:
        given = json.loads(text)
        bounds = {name: [float(bound) for bound in given[name]] for name in given}
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a JSON object of lists of numbers") from error
    for name, values in bounds.items():
        if not values or not all(map(math.isfinite, values)) or sorted(set(values)) != values:
            raise argparse.ArgumentTypeError(f"{name}: {given[name]} is not an increasing list of numbers")
    return bounds


def text_list(flag: str) -> Callable[[str], list[str]]:
    """Return the type of a flag whose value is a JSON list of texts."""

    def read(text: str) -> list[str]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise argparse.ArgumentTypeError(f"must be a JSON list of texts ({text[:100]}); write {flag} '[\"*\"]'")
        return value

    return read


def sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError("not 64 hexadecimal digits; use the output of: printf %s TOKEN | sha256sum")
    return text.lower()


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is below {least}")
    if number > MAX_INT64:
        raise argparse.ArgumentTypeError(f"{text[:40]} exceeds 64 bits")
    return number
