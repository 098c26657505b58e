"""Hypothesis strategies for configurations, requests and weights."""
