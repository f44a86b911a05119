"""What all commands measure with: inputs, masks, the oracle, the timing protocol, the runner."""
