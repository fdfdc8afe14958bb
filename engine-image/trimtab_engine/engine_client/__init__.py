"""The API server's side of the engine cores: starting them, balancing requests over them, collecting their replies."""
