"""Keys split among blocks, and the results over the parts combined."""
