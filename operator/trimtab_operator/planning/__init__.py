"""Pure planning of one reconcile: snapshot in, plan out."""
