"""Compare ranks with one device."""
