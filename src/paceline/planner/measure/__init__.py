"""Measures the inputs of a plan: the workers' delays, and the model's curvature and noise."""
