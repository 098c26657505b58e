"""Suites: what is compared with what.

A module here holds one suite, named ``SUITE`` (`servespec.conformance.checks.suite.Suite`): a
strategy that makes cases and a check that runs one. `servespec.conformance.checks.registry` lists
them; running, shrinking, replaying and reporting are the same for all.
"""
