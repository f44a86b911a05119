"""From a call to what runs it: the choice of an implementation, plans, their cache."""
