"""What the tuner's hot knobs bring on one replica, in virtual time: the rows of docs/results/live-parameters.md."""
