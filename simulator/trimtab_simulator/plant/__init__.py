"""What is steered: replicas of an engine in virtual time, a router before them, cold starts, drains and scrapes."""
