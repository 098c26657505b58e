"""From a schedule to the batch a worker runs."""
