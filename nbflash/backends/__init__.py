"""The implementations, and one protocol over them."""
