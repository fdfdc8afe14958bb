"""Requests that wait in the router: priority bands, fairness between tenants, and bounds."""
