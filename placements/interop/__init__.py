"""Other engines for the same types: `spmd_types`, DTensor, and how they compare.

spmd_types, dtensor     our types in a peer's words and back; a program under its checker
programs, cases         straight-line programs as data, in the vocabulary that all share
engines, fake_world     what an engine is asked, and ours; a process group for the others
checked                 programs that our checker has judged: given ones and drawn ones
reference               what a program means on one device; whether ranks compute that
differences             table: every known disagreement, with its reason
compare, report         all engines on one program; docs/differences.md

Nothing is imported here: `placements` itself needs no peer.
"""
