"""The reconcile loop: observe, plan, execute. The only package with a clock and an event loop."""
