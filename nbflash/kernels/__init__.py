"""One kernel per file, each a factory over a frozen configuration."""
