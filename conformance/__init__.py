"""Random batches into any implementation, and verdicts."""
