"""The persistent batch in preallocated buffers."""
