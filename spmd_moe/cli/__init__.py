"""The command `spmd-moe`: check a layer, train with it, show the bugs that types refuse.

main        arguments, one line for bad input, exit codes
terminal    the console, and the error that is one line
"""
