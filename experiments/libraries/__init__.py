"""Implementations of attention that are checked, counted or timed: nbflash, peers, baselines."""
