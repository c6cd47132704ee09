"""Logs of several ranks side by side: the first lie."""

import torch
from torch import Tensor

from placements.runtime.fingerprints import Fingerprint, project
from placements.types.mesh import Mesh
from placements.verification.crosscheck import verdict
from placements.verification.logs import Claim, Event, Log, MeshKey


def fingerprint(x: Tensor, rtol: float | None = None) -> Fingerprint:
    return Fingerprint.of(tuple(x.shape), x.dtype, project(x).tolist(), rtol)


def test_an_event_that_one_rank_does_not_have_is_a_finding() -> None:
    mesh = MeshKey.of(Mesh({"tp": 2}))
    number = fingerprint(torch.ones(1))
    event = Event("value", "f at a.py:1", 1, "x", mesh, {"tp": Claim("R")}, number)
    error = verdict({0: Log([event]), 1: Log()})[0]
    assert error is not None
    assert (error.where, error.name, error.axis) == ("f at a.py:1", "x", "tp")
    assert "but not on rank 1" in error.headline
    assert verdict({0: Log([event]), 1: Log([event])})[0] is None
    other = event._replace(claims={"tp": Claim("I")})
    error = verdict({0: Log([event]), 1: Log([other])})[0]
    assert error is not None and error.actual == "Invariant on rank 1"
