"""`trimtab-engine autotune`: the values of three live knobs by which one engine does most under latency limits.

limits and space (what is asked) → search (which run next, pure) with bounds (which runs are not worth making) → trials
and engine (making them: the load of `bench serve`, live changes) with state (what was seen, so that it resumes) →
report, page and patch (what comes of it); run puts it together. It never imports torch.
"""
