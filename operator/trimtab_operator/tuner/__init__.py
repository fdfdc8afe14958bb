"""Pure function from engine metrics to the live parameters and the replica count.

The rest of the operator calls only `decide.decide(snapshots, state, settings, now)`; docs/guides/tuning.md describes
the control law.
"""
