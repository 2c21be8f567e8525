"""The mathematics: what a result is, and what a step does with it."""
