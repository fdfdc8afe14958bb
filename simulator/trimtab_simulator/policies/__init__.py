"""Who steers: our tuner, the rivals by their published rules, and fixed values. One file per rule."""
