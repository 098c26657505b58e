"""The same contracts in place and fast."""
