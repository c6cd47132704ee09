"""Calls that a static checker must still report through the decorators."""

import torch

from tests.static.annotated import Gate, Routing, scaled

scaled(1)
scaled(torch.ones(2, 2), scale="two")
Routing(gates_TK=torch.ones(1, 1))
Gate("four", 8)
