"""Compiled code on disk: what it is known by, and files that are whole or not there."""
