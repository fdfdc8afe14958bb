"""The engine's side of the state stream (docs/reference/contract.md section 8)."""
