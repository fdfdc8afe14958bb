"""Where replicas come from: EndpointSlices of a Service, or a fixed list."""
