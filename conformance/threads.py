"""How many threads an operation may use."""

from __future__ import annotations

__all__ = ["ONE_THREAD"]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process whose operations use one thread; read when NumPy and torch load."""
