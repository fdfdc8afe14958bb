"""Effect of the tuner's live parameters on one replica, in virtual time: the rows of
docs/results/live-parameters.md.
"""
