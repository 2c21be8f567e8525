"""Says before a run what is likely to pay, by simulating it."""
