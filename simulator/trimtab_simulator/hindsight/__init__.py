"""What could have been had with the trace known beforehand: fixed values, rivals' targets, and the oracle."""
