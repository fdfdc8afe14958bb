"""Replays traces of real load against replicas in virtual time, under any policy: `trimtab simulate`.

trace/ reads and transforms load · plant/ is replicas, their router and their cold starts · policies/ steer them ·
`replay` brings the three together · `scores`, `report` and `table` say what came of it. Nobody imports this package but
the command line.
"""
