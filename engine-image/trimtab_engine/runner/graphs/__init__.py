"""CUDA graphs: which graphs to capture (`compilation`, `plan`), which one a step replays (`dispatcher`), and capturing.

A graph replays a step's kernels with one call, on tensors at fixed addresses: the host's cost of launching hundreds of
kernels is paid once, at start-up.
"""
