"""Servers: processes that keep the model in slices, and the driver's recovery of lost slices."""
