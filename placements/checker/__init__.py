"""`typecheck()`: infer and check the type of every tensor that an op makes."""
