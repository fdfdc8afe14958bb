"""The engine core: its process and the loop that schedules, runs and samples."""
