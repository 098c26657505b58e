"""Faults planted on purpose, which the checks must find."""
