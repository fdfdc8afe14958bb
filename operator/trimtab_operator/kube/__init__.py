"""Access to the Kubernetes API server: client, informer cache, watches, Lease, webhook."""
