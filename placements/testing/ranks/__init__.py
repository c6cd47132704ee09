"""Run a program on simulated ranks or on processes."""
