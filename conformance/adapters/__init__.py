"""How an implementation is driven."""
