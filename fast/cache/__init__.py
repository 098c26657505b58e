"""The block pool, paged tensors and state slots."""
