"""Forecasts the time, money and bytes that a policy needs to reach a loss."""
