"""Keys split among blocks or calls, and the results over the parts combined."""
