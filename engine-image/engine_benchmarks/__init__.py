"""Development measurements of the engine. Each module measures one aspect and prints a table, or JSON with -o json."""
