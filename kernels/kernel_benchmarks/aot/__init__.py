"""Ahead-of-time compilation: every (kernel, configuration) that the engine launches, compiled without a GPU.

`cases` lists the launches, `specialisation` derives Triton's specialisation, `compiler` compiles and reads the
resources, `report` writes them. `python -m kernel_benchmarks.aot --help`.
"""
