"""Client of the engines' state streams, and the registry of replicas that they keep current."""
