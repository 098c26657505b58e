"""Schedulers: who runs how many tokens in a step."""
