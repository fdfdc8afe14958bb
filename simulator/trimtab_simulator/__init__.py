"""Replays traces of real load on replicas in virtual time, under any scaling policy: `trimtab simulate`.

trace/ reads and transforms load · plant/ has replicas, their router and their cold starts · policies/ has scaling
policies · `replay` combines them · `scores`, `results` and `report` evaluate the outcome. Only the command line imports
this package.
"""
