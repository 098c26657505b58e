"""The mathematics of the layers, in float64."""
