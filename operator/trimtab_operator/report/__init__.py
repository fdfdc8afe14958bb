"""Status and conditions of resources."""
