"""Flows: for each family of ops, which operands it has and where their dims go.

A flow takes the op's row and the call's arguments, tensors replaced by `Operand`s, and
returns the type (or types) of the result. It binds arguments the way torch does.
"""
