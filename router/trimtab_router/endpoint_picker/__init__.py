"""Endpoint picker of the Gateway API Inference Extension: chooses replicas for a gateway instead of proxying."""
