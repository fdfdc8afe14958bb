"""`trimtab-engine bench serve`: load on any OpenAI-compatible server, and what its clients saw. It never imports torch.

samples (what to send) → arrivals (when) → load and client (sending it) → statistics → report and plot.
"""
