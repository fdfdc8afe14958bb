"""The HTTP servers themselves: processes, readiness, admission, identity and errors."""
