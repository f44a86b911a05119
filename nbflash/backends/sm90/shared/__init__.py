"""What Hopper's forward, backward and decode have in common."""
