"""The board: a read-only page with the load, parameters and decisions of each deployment (docs/guides/board.md)."""
