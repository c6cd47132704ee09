"""What can be said of a tensor."""
