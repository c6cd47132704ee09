"""THE legend of dimension letters, and the shapes that signatures name.

    B  batch               L  sequence            T  tokens held here
    D  model               F  hidden of an expert H  hidden of the shared experts
    K  choices per token   N  slots, T * K        M  rows received here
    E  experts in all      G  experts held here   W  ranks on the expert axis

A name ends in the letters of its tensor's dims: `x_TD`. A *token* is a row of `x_TD`; a
*slot* is a (token, choice) pair; a *row* is a slot's copy of its token; a *gate* is the
weight on it; a *plan* is what undoes dispatch. R, I, V, P and S are no dims: they are
placements.
"""

from typing import TypeAlias

from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

X: TypeAlias = Float[Tensor, "*B L D"]
TD: TypeAlias = Float[Tensor, "T D"]
OtherTD: TypeAlias = Float[Tensor, "_ D"]  # with another number of tokens here
TK: TypeAlias = Float[Tensor, "T K"]
ND: TypeAlias = Float[Tensor, "N D"]
MD: TypeAlias = Float[Tensor, "M D"]
ED: TypeAlias = Float[Tensor, "E D"]
HD: TypeAlias = Float[Tensor, "H D"]
DH: TypeAlias = Float[Tensor, "D H"]
GFD: TypeAlias = Float[Tensor, "G F D"]
GDF: TypeAlias = Float[Tensor, "G D F"]

# In bf16 other experts are chosen, so scores and gates are float32 at least; so is the
# bias, to which a small step in bf16 would add nothing.
BiasE: TypeAlias = Float32[Tensor, " E"] | Float64[Tensor, " E"]
ScoresTE: TypeAlias = Float32[Tensor, "T E"] | Float64[Tensor, "T E"]
GatesTK: TypeAlias = Float32[Tensor, "T K"] | Float64[Tensor, "T K"]

IdsTK: TypeAlias = Int[Tensor, "T K"]
MapTE: TypeAlias = Int[Tensor, "T E"]
IndexN: TypeAlias = Int[Tensor, " N"]
IndexM: TypeAlias = Int[Tensor, " M"]
CountsE: TypeAlias = Int[Tensor, " E"]
CountsG: TypeAlias = Int[Tensor, " G"]
CountsWG: TypeAlias = Int[Tensor, "W G"]
