"""Operand types -> result type: pure, without torch."""
