"""Draw values, types and arguments with hypothesis."""
