"""Case files: write, read, replay, shrink."""
