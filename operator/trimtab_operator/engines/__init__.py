"""Access to running engines and to Prometheus: admin API, scrapes, queries."""
