"""Keys of a decode split among blocks, and the results of the splits combined."""
