"""State of this thread, attributes on objects, messages."""
