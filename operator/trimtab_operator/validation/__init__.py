"""Validation rules of the resource, shared by webhook, reconcile loop and command line."""
