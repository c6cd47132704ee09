"""What follows from the declared types of parameters."""
