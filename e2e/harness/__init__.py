"""What the user stories and the demo stand on: kubectl, waiting with evidence, installing, port-forwards, and load.

Everything here talks to a real cluster through the same tools that a user has.
"""
