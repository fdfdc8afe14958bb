"""Ahead-of-time compilation: every (kernel, configuration) that the engine launches, compiled where there is no GPU.

`cases` says what is launched, `specialisation` what Triton makes of it, `compiler` compiles and reads the resources,
`report` writes them down. `python -m kernel_benchmarks.aot --help`.
"""
