"""The `paceline` command. What takes long to import is imported inside the commands."""
