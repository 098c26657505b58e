"""The block pool, prefix hashes and the groups that share blocks."""
