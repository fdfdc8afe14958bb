"""Data-parallel cores over several nodes: node 0, which serves the API, and the others, which only compute."""
