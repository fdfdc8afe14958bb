"""Sources of replicas: EndpointSlices of a Service, or a fixed list."""
