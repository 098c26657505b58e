"""Speed, measured side by side and only of what answers correctly."""
