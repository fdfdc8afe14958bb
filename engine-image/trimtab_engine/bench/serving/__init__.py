"""`trimtab-engine bench serve`: load test of any OpenAI-compatible server, with client-side results. Never imports
torch.

samples (what to send) → arrivals (when) → load and client (sending it) → statistics → report and plot.
"""
