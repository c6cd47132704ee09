"""`verify()`: compare values across ranks."""
