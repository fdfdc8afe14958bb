"""`trimtab-engine completion`: completions match the command line."""

import shutil
import subprocess

import pytest
from trimtab_engine.cli import main


def completed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return bash's completions of these words; the last word is incomplete."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(f"'{word}'" for word in ("trimtab-engine", *words))
    command = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _trimtab_engine; printf "%s\\n" "${{COMPREPLY[@]}}"'
    bash = shutil.which("bash")
    assert bash is not None
    output = subprocess.run([bash, "--norc", "-c", f"{script}\n{command}"], capture_output=True, text=True, check=True)
    assert output.stderr == ""
    return output.stdout.split()


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["s"], ["serve"]),
        (["bench", "la"], ["latency"]),
        (["bench", ""], ["--help", "latency", "throughput", "serve", "start"]),
        (["serve", "MODEL", "--dtype", ""], ["auto", "float32", "bfloat16", "float16", "half", "float"]),
        (["bench", "serve", "--dataset-name", "s"], ["sharegpt"]),
        (["serve", "MODEL", "--max-num-seqs"], ["--max-num-seqs", "--max-num-seqs-cap"]),
        (["serve", "--device", "cpu", "--admin-p"], ["--admin-port"]),
        (["bench", "serve", "--request-r"], ["--request-rate"]),
        (["serve", "--fully-sharded"], []),  # known but not supported: never suggested
    ],
)
def test_bash_completes_partial_word(
    capsys: pytest.CaptureFixture[str], words: list[str], completions: list[str]
) -> None:
    assert completed(capsys, *words) == completions
