"""Checks of single operations, by what they belong to."""
