"""HTTP server processes: readiness, drain, and aggregation of several servers."""
