"""CUDA kernels in Triton, with the signatures of the torch reference.

Every result row is the same bits whatever else is in the pass: each product's tile, order of
summation and number of splits are fixed by its weight, a tile always has 16 rows, keys are summed
in blocks fixed by absolute position over a fixed number of splits, nothing is atomic and nothing
is tuned at run time. Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1),
for tests.
"""
