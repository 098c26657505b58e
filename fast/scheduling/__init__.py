"""Schedulers on mutable state."""
