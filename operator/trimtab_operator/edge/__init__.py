"""The only input and output: the Kubernetes API, metrics, engines' admin API, lease, webhook."""
