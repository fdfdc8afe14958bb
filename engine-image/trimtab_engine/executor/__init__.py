"""Workers of the other ranks: processes, messages, rendezvous and failure detection."""
