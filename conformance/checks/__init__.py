"""Suites: what is compared with what."""
