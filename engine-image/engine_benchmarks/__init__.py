"""Development measurements of the engine. Each module measures one thing and prints a table, or JSON with -o json."""
