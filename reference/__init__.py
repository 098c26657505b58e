"""The executable specification: pure functions over immutable values."""
