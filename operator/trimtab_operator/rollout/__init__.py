"""Pure rules of rollouts: surge, rollback, replacement and placement of pods."""
