"""`trimtab-engine completion`: what a shell completes is what the command line knows."""

import shutil
import subprocess

import pytest
from trimtab_engine.cli import main


def completed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What bash offers behind these words; the last one is begun."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(f"'{word}'" for word in ("trimtab-engine", *words))
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _trimtab_engine; printf "%s\\n" "${{COMPREPLY[@]}}"'
    bash = shutil.which("bash")
    assert bash is not None
    told = subprocess.run([bash, "--norc", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert told.stderr == ""
    return told.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["s"], ["serve"]),
        (["bench", "la"], ["latency"]),
        (["serve", "MODEL", "--max-num-seqs"], ["--max-num-seqs", "--max-num-seqs-cap"]),
        (["serve", "--device", "cpu", "--admin-p"], ["--admin-port"]),
        (["bench", "serve", "--request-r"], ["--request-rate"]),
        (["serve", "--fully-sharded"], []),  # known, and not supported: never offered
    ],
)
def test_a_word_that_is_begun_is_completed(
    capsys: pytest.CaptureFixture[str], words: list[str], offered: list[str]
) -> None:
    assert completed(capsys, *words) == offered


def test_the_words_of_one_command_are_listed_for_others_to_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "words", "bench"]) == 0
    assert {"latency", "throughput", "serve", "--help"} == set(capsys.readouterr().out.split())
    assert main(["completion", "words", "nope"]) == 2
