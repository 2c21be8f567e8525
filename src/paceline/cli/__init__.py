"""The `paceline` command; slow imports are inside the commands."""
