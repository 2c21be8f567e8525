"""Sets the size of each worker's task, and places data with workers."""
