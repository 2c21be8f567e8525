"""How long workers take to respond: models of the seconds that one task lasts."""
