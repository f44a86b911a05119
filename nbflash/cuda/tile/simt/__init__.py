"""Tiles of one block's threads, without tensor cores."""
