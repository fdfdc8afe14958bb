"""What should be done, as functions of values: no client, no clock, no cluster."""
