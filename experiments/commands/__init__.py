"""What each command runs: ``run`` of the module of its name measures, prints and writes."""
