"""Flows: for each family of ops, which operands it has and where their dims go.

A flow takes the op's row and the slots of the call by name, tensors replaced by `Operand`s,
and returns the type (or types) of the result. `signature.py` has bound the arguments.
"""
