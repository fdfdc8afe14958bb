"""The controlled system: engine replicas in virtual time with a router, cold starts, drains and scrapes."""
