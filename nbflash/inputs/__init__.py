"""What a caller gives, checked: arrays, problems, dropout, the arrays of a score."""
