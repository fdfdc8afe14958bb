"""CUDA graphs: which are captured (`compilation`, `plan`), which one a step takes (`dispatcher`), and the capturing.

A graph replays a step's kernels with one call, on tensors that never move: what the host would spend on launching
hundreds of them is spent once, at start-up.
"""
