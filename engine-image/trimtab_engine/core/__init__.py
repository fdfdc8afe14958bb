"""The engine core: one loop that schedules, runs and samples, and the process in which it lives."""
